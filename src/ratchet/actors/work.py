"""The child tasks of one actor, and the replies that wait for them.

Consumes coroutines; produces replies to asks and, for an exception that no ask takes, the failure
of the actor. It waits for children only while the actor stops, and then at most for a given time.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

from ratchet.actors.reply import Reply
from ratchet.actors.system import Log
from ratchet.errors import ActorDead, HandlerFailed, RatchetError
from ratchet.messages import Message

T = TypeVar("T")

Answer: TypeAlias = Message | Awaitable[Message | None] | None
"""What a handler returns: the reply; or the task that will have it; or nothing."""


class Work:
    """Child tasks and deferred replies of one actor. All of it runs on the actor's loop.

    Args:
        name: the actor's name.
        loop: where the actor runs.
        log: where it logs.
        fail_actor: told the first exception that no ask takes.
    """

    def __init__(
        self,
        name: str,
        loop: asyncio.AbstractEventLoop,
        log: Log,
        fail_actor: Callable[[BaseException], None],
    ) -> None:
        self._name = name
        self._loop = loop
        self._log = log
        self._fail_actor = fail_actor
        self._stopped = False
        self._children: dict[asyncio.Task[Any], None] = {}  # ordered, as a set is not
        self._answering: set[asyncio.Future[Any]] = set()
        self._deferred: dict[Reply[Any], None] = {}

    def spawn(self, coro: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a child task.

        Raises:
            ActorDead: the actor takes no more messages; the coroutine is closed.
        """
        if self._stopped:
            coro.close()
            raise ActorDead(f"{self._name} has stopped and does not start {name}")
        task = self._loop.create_task(coro, name=f"{self._name}.{name}")
        self._children[task] = None
        task.add_done_callback(self._on_child_done)
        return task

    def answer(self, reply: Reply[Any], what: str, answer: Answer) -> None:
        """Settle the reply to `what`: now, or when the awaitable has its outcome."""
        if isinstance(answer, Message):
            reply.set(answer)
        elif answer is None:
            reply.fail(HandlerFailed(f"{self._name} has no reply to {what}"))
            self._log.error("no_reply", message=what)
        else:
            future = answer if asyncio.isfuture(answer) else self.spawn(_wait_for(answer), what)
            self._answering.add(future)
            self._deferred[reply] = None
            future.add_done_callback(functools.partial(self._on_answer, reply, what))

    def fail(self, reply: Reply[Any], what: str, error: BaseException) -> None:
        """Send an error to whoever asked: a `RatchetError` as it is, others as `HandlerFailed`."""
        if isinstance(error, RatchetError):
            reply.fail(error)
            return
        self._log.error("handler_failed", message=what, exc_info=error)
        failed = HandlerFailed(f"{self._name} failed at {what}: {type(error).__name__}: {error}")
        failed.__cause__ = error
        reply.fail(failed)

    def cancel(self) -> None:
        """Start nothing more and cancel the children. Idempotent; does not wait."""
        self._stopped = True
        for task in list(self._children):
            task.cancel()

    async def drain(self, timeout_s: float) -> None:
        """Wait until the cancelled children have ended; one that does not is logged and left."""
        if self._children:
            await asyncio.wait(list(self._children), timeout=timeout_s)
            for task in self._children:
                self._log.error("child_ignores_cancellation", child=task.get_name())

    def abandon(self) -> None:
        """End the asks that still wait for a reply. Idempotent."""
        deferred, self._deferred = self._deferred, {}
        for reply in deferred:
            reply.fail(ActorDead(f"{self._name} stopped before it had the reply"))

    def _on_child_done(self, task: asyncio.Task[Any]) -> None:
        del self._children[task]
        error = None if task.cancelled() else task.exception()
        if error is None or task in self._answering:
            return
        if self._stopped:
            self._log.error("child_failed", child=task.get_name(), exc_info=error)
        else:
            self._fail_actor(error)

    def _on_answer(self, reply: Reply[Any], what: str, future: asyncio.Future[Any]) -> None:
        self._answering.discard(future)
        if reply not in self._deferred:
            return
        del self._deferred[reply]
        if future.cancelled():
            reason = "stopped before it had" if self._stopped else "cancelled"
            kind = ActorDead if self._stopped else HandlerFailed
            reply.fail(kind(f"{self._name} {reason} the reply to {what}"))
        elif (error := future.exception()) is not None:
            self.fail(reply, what, error)
        else:
            self.answer(reply, what, future.result())


async def _wait_for(awaitable: Awaitable[T]) -> T:
    return await awaitable
