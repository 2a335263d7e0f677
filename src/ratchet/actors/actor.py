"""The actor: Pykka's API (`start`, `tell`, `ask`, `stop`, refs) on an asyncio task.

An actor consumes the messages of its inbox, one after the other, and produces replies and messages
to others. It waits for its inbox only; a handler is a plain function and waits for nothing. Long
work runs in child tasks (`spawn`), which may await, and which come back as a reply or as a message.
So an ask, a reply or a control message is never stuck behind work. Every wait for another actor
goes through `ask`, which has a deadline and shows in `System.waits`.
"""

from __future__ import annotations

import abc
import asyncio
import threading
from collections.abc import Awaitable, Coroutine, Mapping
from types import TracebackType
from typing import Any, ClassVar, Generic, TypeVar, cast

from ratchet.actors.dispatch import accepted, unhandled
from ratchet.actors.inbox import STOP, Envelope
from ratchet.actors.life import Life
from ratchet.actors.pykka_base import PykkaActor
from ratchet.actors.ref import LocalRef
from ratchet.actors.reply import Reply, running_loop
from ratchet.actors.system import System, current_actor
from ratchet.actors.work import Answer
from ratchet.errors import AskTimeout
from ratchet.messages import Ask
from ratchet.status import Fact
from ratchet.transport.mailbox.base import Ref

__all__ = ["Actor", "Answer", "LocalRef"]

M = TypeVar("M")
R = TypeVar("R")
T = TypeVar("T")


class Actor(PykkaActor, Generic[M]):
    """Base of all actors. M is the union of the message classes that it accepts.

    `receive` must handle every member of M, or the class cannot be defined. A message of any other
    type is a dead letter, and an error to whoever asked. A handler that raises under an ask fails
    the ask; under a tell, or in a child task whose result nobody waits for, it fails the actor.

    Args:
        system: what the actors of this process share.
        name: unique in this process while the actor lives.

    Raises:
        RuntimeError: no event loop runs in this thread, and the system has none.
    """

    _accepts: ClassVar[frozenset[type] | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        messages = accepted(cls, Actor)
        if messages is not None:
            cls._accepts = messages
        if cls._accepts is not None and (missing := unhandled(cls, cls._accepts)):
            raise TypeError(
                f"{cls.__name__}.receive does not handle {', '.join(missing)}:"
                " add a case for each, by class name"
            )

    def __init__(self, system: System, name: str) -> None:
        # Not Pykka's __init__: it draws a random urn, and ids come from the system.
        loop = running_loop() or system.loop
        if loop is None:
            raise RuntimeError(
                f"no event loop for {name}: start it from a coroutine, or give System(loop=...)"
            )
        self.system = system
        self.name = name
        self._life = Life(self, type(self)._accepts or frozenset(), system, name, loop)
        self.log = self._life.log
        self.actor_urn = system.new_id()
        self.actor_inbox = self._life.inbox
        self.actor_stopped = threading.Event()
        self._actor_ref = LocalRef(self, system, name, self._life.inbox)

    # --- what a subclass writes

    @abc.abstractmethod
    def receive(self, message: M) -> Answer:
        """Handle one message, without waiting.

        Returns:
            The reply to an ask; or the child task (or any awaitable) that will end in the reply,
            which then holds up no other message; or None, for a message that was told.
        """

    def end_turn(self) -> None:
        """Run after the last of the messages that are handled without a pause, under its trace.

        What several messages have in common is done here once: a commit, an answer to all.
        """

    def on_start(self) -> Awaitable[None] | None:
        """Run before the first message. May return an awaitable; then that is awaited first."""

    def on_stop(self) -> Awaitable[None] | None:
        """Run at the end of a stop, after the last message and child. May return an awaitable.

        Not called when the actor fails or its loop shuts down.
        """

    def release(self) -> Awaitable[None] | None:
        """Let go of threads, memory and links, after `on_stop` or `on_failure`. May return an
        awaitable. Idempotent.

        Not called when its loop shuts down.
        """

    def on_failure(
        self,
        exception_type: type[BaseException] | None,
        exception_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Run when an exception ended the actor: in start, tell, child task or stop."""

    def status(self) -> Mapping[str, Fact]:
        """Say how it does, in a few plain facts: for `ratchet status`.

        Called on the actor's loop, between two messages, once per `runtime.heartbeat_s`: it must
        be cheap and change nothing.
        """
        return {}

    # --- what a subclass uses

    @classmethod
    def start(cls, *args: Any, **kwargs: Any) -> LocalRef:
        """Start an actor: on the running loop, or on `System.loop` from a plain thread.

        Raises:
            ValueError: a living actor of the system has the name.
        """
        return cast("LocalRef", super().start(*args, **kwargs))

    @property
    def actor_ref(self) -> LocalRef:
        """The handle on this life of the actor; safe to give to anyone."""
        return cast("LocalRef", self._actor_ref)

    def stop(self) -> None:
        """Tell itself to stop, after what is queued now."""
        self._life.inbox.put(Envelope(STOP, None, None, None))

    def now(self) -> float:
        """The event loop's clock, seconds. Differences mean something, values do not."""
        return self._life.loop.time()

    def spawn(self, coro: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Run long work beside the mailbox, under the trace of the message in hand.

        If it raises and is not the answer to an ask, the actor fails. When the actor stops, it is
        cancelled and awaited. Only from the actor's own code, never from another thread.

        Raises:
            ActorDead: the actor takes no more messages; the coroutine is closed.
        """
        return self._life.work.spawn(coro, name)

    def after(self, delay_s: float, message: M) -> asyncio.TimerHandle:
        """Tell itself `message` in `delay_s` seconds, unless it has stopped by then."""
        return self._life.loop.call_later(delay_s, self.__tell, message)

    async def ask(self, ref: Ref, message: Ask[R], *, timeout: float | None = None) -> R:
        """Ask another actor, from a child task; the wait shows in `System.waits`.

        Raises:
            AskTimeout: no reply in `timeout` seconds (`System.ask_timeout_s` if not given); names
                the cycle if the actors wait for each other.
            RatchetError: whatever the other one failed with.
        """
        timeout_s = self.system.ask_timeout_s if timeout is None else timeout
        since = self.now()
        waits = self.system.waits
        what = type(message).__name__
        with waits.on(who=self.name, on=ref.name, what=what, since=since, until=since + timeout_s):
            try:
                return await ref.ask(message, block=False, timeout=timeout_s)
            except AskTimeout as error:
                cycle = waits.cycle(self.name, ref.name)
                if not cycle:
                    raise
                raise AskTimeout(f"{error}; they wait in a cycle: {' -> '.join(cycle)}") from error

    def __tell(self, message: M) -> None:
        if not self.actor_stopped.is_set():
            envelope = Envelope(message, None, self.system.trace(), current_actor.get())
            self._life.inbox.put(envelope)

    # --- what Pykka calls

    @staticmethod
    def _create_actor_inbox() -> Any:
        raise NotImplementedError("an inbox belongs to a loop: Actor.__init__ makes it")

    @staticmethod
    def _create_future() -> Reply[Any]:
        return Reply()

    def _start_actor_loop(self) -> None:
        self._life.begin()
