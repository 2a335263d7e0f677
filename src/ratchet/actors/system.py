"""What the actors of one process share, and the only door for what is impure.

Clock, randomness, ids, log and links come in through `System`; nothing in `ratchet.actors` makes
its own, so that a simulation of many processes on one virtual loop is repeatable. A system waits
for nothing. It resolves a name at each send, so that a ref outlives a restart.
"""

from __future__ import annotations

import asyncio
import itertools
import random  # noqa: TID251 - the type of what comes in
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, Protocol, TypeVar

from ratchet.actors.dead_letters import DeadLetterBox
from ratchet.actors.reply import Reply
from ratchet.errors import ActorDead
from ratchet.messages import Ask, Down, Message, RunEnded
from ratchet.status import Fact, LinkRow
from ratchet.transport.mailbox.base import Directory, Recipient, Ref, Trace, Wait, current_trace
from ratchet.transport.mailbox.book import AddressBook

R = TypeVar("R")

current_actor: ContextVar[str | None] = ContextVar("current_actor", default=None)
"""Name of the actor that runs this code, a child task of it included; None outside."""


class Log(Protocol):
    """What is used of a structlog logger."""

    def debug(self, event: str, **fields: Any) -> Any: ...  # noqa: D102
    def info(self, event: str, **fields: Any) -> Any: ...  # noqa: D102
    def warning(self, event: str, **fields: Any) -> Any: ...  # noqa: D102
    def error(self, event: str, **fields: Any) -> Any: ...  # noqa: D102


class ActorLog:
    """Adds the actor's name to whatever it logs."""

    def __init__(self, log: Log, name: str) -> None:
        self._log = log
        self._name = name

    def debug(self, event: str, **fields: Any) -> None:
        """Log at level debug."""
        self._log.debug(event, actor=self._name, **fields)

    def info(self, event: str, **fields: Any) -> None:
        """Log at level info."""
        self._log.info(event, actor=self._name, **fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Log at level warning."""
        self._log.warning(event, actor=self._name, **fields)

    def error(self, event: str, **fields: Any) -> None:
        """Log at level error."""
        self._log.error(event, actor=self._name, **fields)


class WaitTable:
    """Who waits, on whom, for what, since when and until when."""

    def __init__(self) -> None:
        self._rows: dict[int, Wait] = {}
        self._keys = itertools.count()

    @contextmanager
    def on(self, *, who: str, on: str, what: str, since: float, until: float) -> Iterator[None]:
        """Keep a row in the table for as long as the block lasts."""
        key = next(self._keys)
        self._rows[key] = Wait(who, on, what, since, until)
        try:
            yield
        finally:
            del self._rows[key]

    def rows(self) -> list[Wait]:
        """The waits that go on, oldest first. Safe from any thread."""
        return list(self._rows.values())

    def cycle(self, who: str, on: str) -> list[str]:
        """The names from `who` over `on` back to `who` along waits that go on; empty if none."""
        edges: dict[str, list[str]] = {}
        for row in self.rows():
            edges.setdefault(row.who, []).append(row.on)
        paths, seen = [[who, on]], {on}
        while paths:
            path = paths.pop(0)
            if path[-1] == who:
                return path
            for name in edges.get(path[-1], []):
                if name not in seen:
                    seen.add(name)
                    paths.append([*path, name])
        return []


class Living(Ref, Protocol):
    """A ref of an actor of this process."""

    def is_alive(self) -> bool:
        """Whether it still takes messages."""
        ...

    @property
    def depth(self) -> int:
        """Messages that wait to be handled."""
        ...

    def status(self) -> Mapping[str, Fact]:
        """What the actor says of itself; on its own loop only."""
        ...


class NamedRef:
    """An actor by its name, wherever it lives at the moment of each send."""

    def __init__(self, system: System, name: str) -> None:
        self._system = system
        self._name = name

    def __repr__(self) -> str:
        return f"<NamedRef {self._name}>"

    @property
    def name(self) -> str:
        """The actor's name."""
        return self._name

    def tell(self, message: Message) -> None:
        """Send and forget; a dead letter if nobody has the name."""
        target = self._system.find(self._name)
        if target is not None:
            target.tell(message)
        else:
            self._system.dead_letters.record(
                sender=current_actor.get(),
                receiver=self._name,
                message=message,
                reason="no such actor",
            )

    def ask(
        self, message: Ask[R], *, block: Literal[False] = False, timeout: float | None = None
    ) -> Awaitable[R]:
        """Send, and return an awaitable; it ends in `ActorDead` if nobody has the name."""
        timeout_s = self._system.ask_timeout_s if timeout is None else timeout
        target = self._system.find(self._name)
        if target is not None:
            return target.ask(message, block=block, timeout=timeout_s)
        reply: Reply[R] = Reply(current_actor.get(), self._name, type(message).__name__)
        reply.fail(ActorDead(f"there is no actor {self._name}"))
        return reply

    def watch(self, watcher: Recipient) -> None:
        """Tell `watcher` a `Down` once the present bearer of the name ends; at once if none."""
        target = self._system.find(self._name)
        if target is not None:
            target.watch(watcher)
        else:
            watcher.tell(Down(self._name, "no such actor"))


class System:
    """The actors of one process, or of one simulated process.

    Args:
        rng: the only source of randomness of its actors.
        wall_time: seconds since the epoch; for records, never to measure a duration.
        new_id: makes an id that no other call, here or elsewhere, makes; safe from any thread.
        log: where actors log.
        ask_timeout_s: deadline of an ask that names none.
        registry_wait_s: how long roles wait for a registry that is away.
        remote: finds actors that do not live here. May be set later.
        loop: where an actor runs that is started from a plain thread.
    """

    def __init__(
        self,
        *,
        rng: random.Random,
        wall_time: Callable[[], float],
        new_id: Callable[[], str],
        log: Log,
        ask_timeout_s: float = 30.0,
        registry_wait_s: float = 60.0,
        remote: Directory | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.rng = rng
        self.wall_time = wall_time
        self.new_id = new_id
        self.log = log
        self.ask_timeout_s = ask_timeout_s
        self.registry_wait_s = registry_wait_s
        self.remote = remote
        self.loop = loop
        self.book = AddressBook()
        """where other processes listen, as far as this one has heard"""
        self.links: Callable[[], Sequence[LinkRow]] = tuple
        """the links of this process; set by whoever opens them"""
        self.run_ended: RunEnded | None = None
        """what this process has heard of the end of the run; None while it goes on"""
        self.dead_letters = DeadLetterBox(log)
        self.waits = WaitTable()
        self._lock = threading.Lock()
        self._actors: dict[str, Living] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}

    def ref(self, name: str) -> NamedRef:
        """A ref by name, resolved at each send: local, else remote, else a dead letter."""
        return NamedRef(self, name)

    def find(self, name: str) -> Ref | None:
        """Whoever has the name now: a local actor, else a remote ref, else None."""
        local = self.local(name)
        if local is None and self.remote is not None:
            return self.remote.ref(name)
        return local

    def local(self, name: str) -> Ref | None:
        """The actor of that name that lives here, if one does."""
        return self._actors.get(name)

    def names(self) -> list[str]:
        """The names of the actors that live here, in the order of their start."""
        with self._lock:
            return list(self._actors)

    def depths(self) -> dict[str, int]:
        """The messages that wait in each actor that lives here. Safe from any thread."""
        with self._lock:
            return {name: ref.depth for name, ref in self._actors.items()}

    def facts(self, name: str) -> dict[str, Fact]:
        """What an actor that lives here says of itself; on its loop only. Empty if none does."""
        ref = self._actors.get(name)
        return dict(ref.status()) if ref is not None else {}

    def register(self, ref: Living) -> None:
        """Give an actor its name. Called as it starts.

        Raises:
            ValueError: a living actor has the name.
        """
        with self._lock:
            present = self._actors.get(ref.name)
            if present is not None and present.is_alive():
                raise ValueError(f"an actor named {ref.name!r} already runs in this process")
            self._actors[ref.name] = ref

    def unregister(self, ref: Living) -> None:
        """Free the name of an actor that takes no more messages. Idempotent."""
        with self._lock:
            if self._actors.get(ref.name) is ref:
                del self._actors[ref.name]

    def keep(self, task: asyncio.Task[None]) -> None:
        """Hold a task until it is done: asyncio itself holds tasks weakly."""
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def abort(self) -> None:
        """End every actor at once, as the death of a process does: no `on_stop`, nothing handled.

        Asks end in `ActorDead`, watchers hear "cancelled". On the actors' loop only.
        """
        for task in list(self._tasks):
            task.cancel()

    def trace(self) -> Trace:
        """The trace of the message in hand, or a new one."""
        return current_trace.get() or Trace(self.new_id(), None)
