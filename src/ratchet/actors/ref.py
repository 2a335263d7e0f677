"""The handle on an actor of this process: Pykka's `ActorRef`, with Ratchet's promises.

Departs from Pykka on purpose: `tell` to a dead actor is a dead letter and does not raise; an ask
always has a deadline and ends in a `RatchetError`; nothing blocks a thread that runs an event loop.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, overload

import pykka

from ratchet.actors.inbox import STOP, Envelope, Inbox
from ratchet.actors.reply import Reply, running_loop
from ratchet.actors.system import System, current_actor
from ratchet.messages import Ask, Down, Message
from ratchet.status import Fact
from ratchet.transport.mailbox.base import Recipient

R = TypeVar("R")


class LocalRef(pykka.ActorRef[Any]):
    """One life of one actor. For a handle that survives a restart use `System.ref`."""

    def __init__(self, actor: Any, system: System, name: str, inbox: Inbox) -> None:
        super().__init__(actor)
        self._system = system
        self._name = name
        self._inbox = inbox
        self._status = weakref.WeakMethod(actor.status)

    def __str__(self) -> str:
        return f"{self.actor_class.__name__} {self._name} ({self.actor_urn})"

    @property
    def name(self) -> str:
        """The actor's name."""
        return self._name

    def is_alive(self) -> bool:
        """Whether it still takes messages."""
        return not self._inbox.closed

    @property
    def depth(self) -> int:
        """Messages that wait to be handled. Safe from any thread."""
        return self._inbox.depth

    def status(self) -> Mapping[str, Fact]:
        """What the actor says of itself; on its own loop only."""
        status = self._status()
        return status() if status is not None else {}

    def tell(self, message: Message) -> None:
        """Send and forget, from any thread. Never raises; to a dead actor it is a dead letter."""
        self._inbox.put(Envelope(message, None, self._system.trace(), current_actor.get()))

    @overload
    def ask(
        self, message: Ask[R], *, block: Literal[False], timeout: float | None = None
    ) -> Reply[R]: ...

    @overload
    def ask(
        self, message: Ask[R], *, block: Literal[True] = True, timeout: float | None = None
    ) -> R: ...

    @overload
    def ask(
        self, message: Ask[R], *, block: bool = True, timeout: float | None = None
    ) -> R | Reply[R]: ...

    def ask(
        self, message: Ask[R], *, block: bool = True, timeout: float | None = None
    ) -> R | Reply[R]:
        """Send, and wait for the reply or return its future.

        Args:
            message: what to ask.
            block: wait here, in a thread that runs no event loop.
            timeout: seconds until `AskTimeout`; `System.ask_timeout_s` if not given.

        Raises:
            RuntimeError: it would block the event loop of this thread; nothing was sent.
            RatchetError: while blocking, whatever the reply's future ends in.
        """
        what = type(message).__name__
        self._refuse_to_block(what, block)
        reply: Reply[R] = self._new_reply(what, timeout)
        self._inbox.put(Envelope(message, reply, self._system.trace(), current_actor.get()))
        return reply.get() if block else reply

    def watch(self, watcher: Recipient) -> None:
        """Tell `watcher` a `Down` once, when the actor has ended; at once if it has already."""

        def mourn(reason: str) -> None:
            watcher.tell(Down(self._name, reason))

        if not self._inbox.at_end(watcher.name, mourn):
            mourn(self._inbox.end_reason or "stopped")

    @overload
    def stop(self, *, block: Literal[True] = True, timeout: float | None = None) -> bool: ...

    @overload
    def stop(self, *, block: Literal[False], timeout: float | None = None) -> Reply[bool]: ...

    @overload
    def stop(self, *, block: bool = True, timeout: float | None = None) -> bool | Reply[bool]: ...

    def stop(self, *, block: bool = True, timeout: float | None = None) -> bool | Reply[bool]:
        """Let the actor handle what is queued, and end. Idempotent.

        Returns:
            When the actor has ended: True if this call found it alive or ending, False if it had
            ended before. A future of that unless `block`.

        Raises:
            RuntimeError: it would block the event loop of this thread; nothing was sent.
            AskTimeout: while blocking, the actor did not end in time.
        """
        self._refuse_to_block("its end", block)
        reply: Reply[bool] = self._new_reply("its end", timeout)
        if self._inbox.at_end(reply, functools.partial(_settle_true, reply)):
            self._inbox.put(Envelope(STOP, None, None, None))
        else:
            reply.set(False)
        return reply.get() if block else reply

    def _new_reply(self, what: str, timeout: float | None) -> Reply[Any]:
        return Reply(
            current_actor.get(),
            self._name,
            what,
            timeout_s=self._system.ask_timeout_s if timeout is None else timeout,
            dead_letters=self._system.dead_letters,
        )

    def _refuse_to_block(self, what: str, block: bool) -> None:
        if block and running_loop() is not None:
            raise RuntimeError(
                f"asking {self._name} for {what} would block the event loop of this thread;"
                " pass block=False and await what it returns"
            )


def _settle_true(reply: Reply[bool], _reason: str) -> None:
    reply.set(True)
