"""The queue of one actor, which closes atomically.

Consumes envelopes from any thread; produces them for its actor, in order. The actor waits here when
nothing is queued and is woken by the first `put` after that: once per burst, not once per message.
It is unbounded, so that a control message always gets in; work is bounded by credits and leases.
Once closed, it answers for the dead: what is put later, and what was left over, ends in `ActorDead`
for an ask and as a dead letter for a tell.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Final

from ratchet.actors.reply import Reply, call_on, wake
from ratchet.errors import ActorDead
from ratchet.transport.mailbox.base import DeadLetters, Trace


class Envelope:
    """A message on its way: who sent it, who waits for the reply, and the trace it belongs to."""

    __slots__ = ("message", "reply", "sender", "trace")

    def __init__(
        self, message: Any, reply: Reply[Any] | None, trace: Trace | None, sender: str | None
    ) -> None:
        self.message = message
        self.reply = reply
        self.trace = trace
        self.sender = sender


class _Stop:
    """Told to an actor by `stop()`."""


STOP: Final = _Stop()


class Inbox:
    """Queue, door and obituary of one actor.

    Args:
        name: the actor's name, for errors and dead letters.
        loop: where the actor runs and waits.
        dead_letters: takes the tells that nobody will handle.
    """

    def __init__(
        self, name: str, loop: asyncio.AbstractEventLoop, dead_letters: DeadLetters
    ) -> None:
        self._name = name
        self._loop = loop
        self._dead_letters = dead_letters
        self._lock = threading.Lock()
        self._queue: deque[Envelope] = deque()
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None
        self._mourners: dict[Hashable, Callable[[str], None]] = {}
        self.end_reason: str | None = None
        """Why the actor ended; None while it lives or is still ending."""

    def put(self, envelope: Envelope, /) -> None:
        """Queue an envelope, from any thread. Never raises and never blocks."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._queue.append(envelope)
            waiter, self._waiter = self._waiter, None
        if closed:
            self._refuse(envelope)
        elif waiter is not None:
            self._wake(waiter)

    def get(self) -> Envelope:
        """Take the next envelope. Only for the actor.

        Raises:
            IndexError: nothing is queued.
        """
        return self._queue.popleft()

    @property
    def closed(self) -> bool:
        """Whether nothing more gets in."""
        return self._closed

    @property
    def depth(self) -> int:
        """How many envelopes are queued. Safe from any thread."""
        return len(self._queue)

    def empty(self) -> bool:
        """Whether nothing is queued."""
        return not self._queue

    async def wait(self) -> None:
        """Return once something is queued, or `wake` was called. Only for the actor."""
        with self._lock:
            if self._queue:
                return
            waiter = self._waiter = self._loop.create_future()
        await waiter

    def wake(self) -> None:
        """Make a `wait` that goes on return."""
        with self._lock:
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            self._wake(waiter)

    def close(self) -> None:
        """Take nothing in from now on, and answer what is left. Idempotent."""
        with self._lock:
            self._closed = True
            left, self._queue = self._queue, deque()
        for envelope in left:
            self._refuse(envelope)

    def at_end(self, key: Hashable, callback: Callable[[str], None]) -> bool:
        """Call `callback(reason)` when the actor has ended; one callback per key.

        Returns:
            False if it has ended already: then nothing is called, see `end_reason`.
        """
        with self._lock:
            if self.end_reason is not None:
                return False
            self._mourners[key] = callback
            return True

    def end(self, reason: str) -> None:
        """Say that the actor has ended. Only the first reason counts."""
        self.close()
        with self._lock:
            if self.end_reason is not None:
                return
            self.end_reason = reason
            mourners, self._mourners = self._mourners, {}
        for callback in mourners.values():
            callback(reason)

    def _wake(self, waiter: asyncio.Future[None]) -> None:
        if not call_on(self._loop, functools.partial(wake, waiter)):
            self.end("its event loop is closed")

    def _refuse(self, envelope: Envelope) -> None:
        if envelope.message is STOP:
            return
        if envelope.reply is not None:
            what = type(envelope.message).__name__
            envelope.reply.fail(ActorDead(f"{self._name} stopped before it handled {what}"))
        else:
            self._dead_letters.record(
                sender=envelope.sender,
                receiver=self._name,
                message=envelope.message,
                reason="actor stopped",
            )
