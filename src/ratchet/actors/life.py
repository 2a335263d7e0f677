"""One life of one actor: the task that runs it, from start to end.

Consumes the envelopes of an inbox, in order, and calls the actor's hooks; produces replies, dead
letters and the news of the end. It waits for the inbox, is unblocked by the first `put`, and lets
other tasks of the loop run after each `YIELD_EVERY` messages. A turn is what it handles without a
pause: until the inbox is empty, or others have to run; at its end the actor may settle what the
messages of the turn have in common.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable
from contextvars import Context
from types import TracebackType
from typing import Any, Final, Protocol

import pykka
from structlog.contextvars import bind_contextvars, reset_contextvars

from ratchet.actors.inbox import STOP, Envelope, Inbox
from ratchet.actors.ref import LocalRef
from ratchet.actors.reply import call_on
from ratchet.actors.system import ActorLog, System, current_actor
from ratchet.actors.work import Answer, Work
from ratchet.errors import ActorDead, HandlerFailed
from ratchet.transport.mailbox.base import Trace, current_trace

YIELD_EVERY: Final = 64


class Hooks(Protocol):
    """What a life calls of its actor."""

    actor_stopped: threading.Event

    @property
    def actor_ref(self) -> LocalRef: ...  # noqa: D102

    def receive(self, message: Any, /) -> Answer: ...  # noqa: D102

    def end_turn(self) -> None: ...  # noqa: D102

    def on_start(self) -> Awaitable[None] | None: ...  # noqa: D102

    def on_stop(self) -> Awaitable[None] | None: ...  # noqa: D102

    def release(self) -> Awaitable[None] | None: ...  # noqa: D102

    def on_failure(  # noqa: D102
        self,
        exception_type: type[BaseException] | None,
        exception_value: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...


class Life:
    """Runs an actor.

    Args:
        actor: whose hooks to call.
        accepts: the message classes that it handles.
        system: what it shares with the others.
        name: its name.
        loop: where it runs.
    """

    def __init__(
        self,
        actor: Hooks,
        accepts: frozenset[type],
        system: System,
        name: str,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._actor = actor
        self._accepts = accepts
        self._system = system
        self._name = name
        self.loop = loop
        self.log = ActorLog(system.log, name)
        self.inbox = Inbox(name, loop, system.dead_letters)
        self.work = Work(name, loop, self.log, self._fail)
        self._failure: BaseException | None = None
        self._end_reason = "cancelled"

    def begin(self) -> None:
        """Take the name and start the task, from any thread.

        Raises:
            ValueError: a living actor has the name.
            RuntimeError: the loop is closed.
        """
        try:
            self._system.register(self._actor.actor_ref)
        except ValueError:
            pykka.ActorRegistry.unregister(self._actor.actor_ref)
            raise
        if not call_on(self.loop, self._launch):
            self._on_done()
            raise RuntimeError(f"the event loop that {self._name} was to run on is closed")

    def _launch(self) -> None:
        # An empty context: an actor must not keep the trace and the log fields of its starter.
        context = Context()
        context.run(current_actor.set, self._name)
        task = self.loop.create_task(self._run(), name=self._name, context=context)
        task.add_done_callback(self._on_done)
        self._system.keep(task)

    async def _run(self) -> None:
        try:
            await _settled(self._actor.on_start())
            await self._serve()
            await self._shut_down()
            await _settled(self._actor.on_stop())
            await _settled(self._actor.release())
            self._end_reason = "stopped"
        except (Exception, asyncio.CancelledError) as error:
            if _is_cancellation(error):
                raise
            self._end_reason = f"{type(error).__name__}: {error}"
            self._report("actor_failed", error)
            await self._shut_down()
            self._call_on_failure(error)
            await self._release_failed()
        except (KeyboardInterrupt, SystemExit) as interrupt:
            self._end_reason = f"{type(interrupt).__name__}: {interrupt}"
            raise

    async def _serve(self) -> None:
        num_handled = 0
        while self._failure is None:
            if self.inbox.empty():
                await self.inbox.wait()
                continue
            envelope = self.inbox.get()
            if envelope.message is STOP:
                self._actor.end_turn()
                return
            num_handled += 1
            is_last = num_handled % YIELD_EVERY == 0
            self._handle(envelope, is_last=is_last)
            if is_last:
                await asyncio.sleep(0)
        raise self._failure

    def _shut(self) -> None:
        """Take no more messages and cancel the children. Idempotent; does not wait."""
        self._actor.actor_stopped.set()
        self._system.unregister(self._actor.actor_ref)
        pykka.ActorRegistry.unregister(self._actor.actor_ref)
        self.inbox.close()
        self.work.cancel()

    async def _shut_down(self) -> None:
        self._shut()
        await self.work.drain(self._system.ask_timeout_s)
        self.work.abandon()

    def _on_done(self, task: asyncio.Task[None] | None = None) -> None:
        """The last word, however the task ended: also if it was cancelled before it began."""
        if task is not None and not task.cancelled():
            task.exception()  # an interrupt: the loop has raised it; asyncio need not log it
        self._shut()
        self.work.abandon()
        self.inbox.end(self._end_reason)

    def _fail(self, error: BaseException) -> None:
        """A child failed and nobody takes its exception."""
        if self._failure is None:
            self._failure = error
            self.inbox.wake()
        else:
            self.log.error("child_failed", exc_info=error)

    def _call_on_failure(self, error: BaseException) -> None:
        try:
            self._actor.on_failure(type(error), error, error.__traceback__)
        except Exception as second:  # noqa: BLE001 - the watchers must still hear of the first
            self._report("on_failure_failed", second)

    async def _release_failed(self) -> None:
        """Whoever watches waits for this, so not for long, and hears of the first error only."""
        try:
            async with asyncio.timeout(self._system.ask_timeout_s):
                await _settled(self._actor.release())
        except Exception as second:  # noqa: BLE001 - see above
            self._report("release_failed", second)

    def _report(self, event: str, error: BaseException) -> None:
        self.log.error(event, reason=self._end_reason, exc_info=error)

    def _handle(self, envelope: Envelope, *, is_last: bool) -> None:
        """Handle a message, and end the turn if there is no further one: under its trace."""
        trace = envelope.trace
        if trace is None or type(envelope.message) not in self._accepts:
            self._refuse(envelope)
            self._end_turn(is_last=is_last)
            return
        token = current_trace.set(trace)
        bound = bind_contextvars(**_log_fields(trace))
        try:
            self._receive(envelope)
            self._end_turn(is_last=is_last)
        finally:
            reset_contextvars(**bound)
            current_trace.reset(token)

    def _end_turn(self, *, is_last: bool) -> None:
        if is_last or self.inbox.empty():
            self._actor.end_turn()

    def _receive(self, envelope: Envelope) -> None:
        message, reply = envelope.message, envelope.reply
        what = type(message).__name__
        try:
            answer = self._actor.receive(message)
        except (Exception, asyncio.CancelledError) as error:
            if reply is None:
                raise
            self.work.fail(reply, what, error)
        except BaseException as interrupt:
            if reply is not None:
                reply.fail(ActorDead(f"{self._name} was interrupted: {type(interrupt).__name__}"))
            raise
        else:
            if reply is not None:
                self.work.answer(reply, what, answer)
            elif inspect.iscoroutine(answer):
                self.work.spawn(answer, what)

    def _refuse(self, envelope: Envelope) -> None:
        what = type(envelope.message).__name__
        self._system.dead_letters.record(
            sender=envelope.sender,
            receiver=self._name,
            message=envelope.message,
            reason="not accepted",
        )
        if envelope.reply is not None:
            envelope.reply.fail(HandlerFailed(f"{self._name} does not accept {what}"))


def _is_cancellation(error: BaseException) -> bool:
    """Whether this task itself is being cancelled, and did not just look into one that was."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _log_fields(trace: Trace) -> dict[str, Any]:
    if trace.version is None:
        return {"trace_id": trace.trace_id}
    return {"trace_id": trace.trace_id, "version": trace.version}


async def _settled(value: Awaitable[None] | None) -> None:
    if value is not None:
        await value
