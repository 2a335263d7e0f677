"""The future of an ask: awaited from any event loop, or waited for from a plain thread.

Consumes one outcome (a reply or an error) from whoever handled the ask; produces it for whoever
waits. It waits for that outcome and for nothing else, and is unblocked by it or by its own
deadline, whichever comes first. What comes second is counted as a dead letter and ignored.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, TypeAlias, TypeVar, cast

import pykka

from ratchet.errors import AskTimeout
from ratchet.transport.mailbox.base import DeadLetters

T = TypeVar("T")
ExcInfo: TypeAlias = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]

_OUTSIDE = "someone outside the actors"


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def call_on(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> bool:
    """Run `callback` on `loop`: at once if this is its thread, soon otherwise.

    Returns False if the loop is closed, so that nothing will ever run there again.
    """
    if running_loop() is loop:
        callback()
        return True
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        return False
    return True


def wake(waiter: asyncio.Future[None]) -> None:
    """Make whoever awaits `waiter` go on; on its loop only."""
    if not waiter.done():
        waiter.set_result(None)


class Reply(pykka.Future[T]):
    """What `ask` returns.

    Settled once, from any thread. The deadline counts from the ask when it was made on an event
    loop; when it was made from a plain thread, from the moment somebody starts to wait.

    Args:
        asker: name of the actor that asks, None outside of actors.
        target: name of the actor that is asked.
        what: what it is asked for, a message's type.
        timeout_s: seconds until it ends in `AskTimeout`; None only for the values that Pykka's own
            `map`, `filter` and `join` derive.
        dead_letters: takes outcomes that come too late.
    """

    def __init__(
        self,
        asker: str | None = None,
        target: str = "",
        what: str = "",
        *,
        timeout_s: float | None = None,
        dead_letters: DeadLetters | None = None,
    ) -> None:
        super().__init__()
        self._asker = asker
        self._target = target
        self._what = what
        self._timeout_s = timeout_s
        self._dead_letters = dead_letters
        self._lock = threading.Lock()
        self._settled = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._derived = False
        self._armed = False
        self._event: threading.Event | None = None
        self._wake_ups: list[tuple[asyncio.AbstractEventLoop, Callable[[], object]]] = []
        loop = running_loop()
        if loop is not None:
            self._arm(loop)

    def set(self, value: T | None = None) -> None:
        """Settle with a value. Never raises: a second outcome is counted and ignored."""
        self._settle(value, None)

    def fail(self, error: BaseException) -> None:
        """Settle with an error. Never raises: a second outcome is counted and ignored."""
        self._settle(None, error)

    def set_exception(self, exc_info: ExcInfo | None = None) -> None:
        """Pykka's way to settle with an error: the one being handled, unless given."""
        error = (sys.exc_info() if exc_info is None else exc_info)[1]
        self.fail(error if error is not None else RuntimeError("set_exception() without one"))

    def set_get_hook(self, func: Callable[[float | None], T]) -> None:
        """Pykka's way to derive a value; used by `map`, `filter`, `join` and `reduce`."""
        self._derived = True
        super().set_get_hook(func)

    def get(self, *, timeout: float | None = None) -> T:
        """Block this thread until the outcome is there, and return or raise it.

        Raises:
            AskTimeout: at the deadline of the ask, or after `timeout` seconds.
            RuntimeError: this thread runs an event loop, which would stand still.
        """
        if self._derived:
            return super().get(timeout=timeout)
        if not self._settled:
            self._block(timeout)
        return self._outcome()

    def __await__(self) -> Generator[Any, None, T]:
        if self._derived:
            raise RuntimeError(
                "a derived future cannot be awaited: await the ask, then map its value"
            )
        if not self._settled:
            loop = asyncio.get_running_loop()
            self._arm(loop)
            waiter = loop.create_future()
            self._on_settled(loop, functools.partial(wake, waiter))
            yield from waiter
        return self._outcome()

    __iter__ = __await__

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._armed or self._timeout_s is None:
            return
        self._armed = True
        self._on_settled(loop, loop.call_later(self._timeout_s, self._expire).cancel)

    def _block(self, timeout: float | None) -> None:
        if running_loop() is not None:
            raise RuntimeError(
                f"waiting for {self._what} of {self._target} would block the event loop of this"
                " thread; use `await ref.ask(..., block=False)`"
            )
        with self._lock:
            if self._settled:
                return
            self._event = self._event or threading.Event()
        if not self._event.wait(self._timeout_s if timeout is None else timeout):
            if timeout is not None:
                raise self._timed_out(timeout)
            self._expire()

    def _on_settled(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
        with self._lock:
            if not self._settled:
                self._wake_ups.append((loop, callback))
                return
        callback()

    def _settle(self, value: T | None, error: BaseException | None) -> None:
        with self._lock:
            late, self._settled = self._settled, True
            if not late:
                self._value, self._error = value, error
                wake_ups, self._wake_ups = self._wake_ups, []
        if late:
            self._record_late(value if error is None else error)
            return
        for loop, callback in wake_ups:
            call_on(loop, callback)  # on a closed loop there is nobody left to wake
        if self._event is not None:
            self._event.set()

    def _record_late(self, outcome: object) -> None:
        if self._dead_letters is not None and not isinstance(outcome, AskTimeout):
            self._dead_letters.record(
                sender=self._target,
                receiver=self._asker or _OUTSIDE,
                message=outcome,
                reason="late reply",
            )

    def _expire(self) -> None:
        with self._lock:
            if self._settled:
                return
        self.fail(self._timed_out(self._timeout_s or 0.0))

    def _timed_out(self, timeout_s: float) -> AskTimeout:
        return AskTimeout(
            f"{self._asker or _OUTSIDE} asked {self._target} for {self._what}:"
            f" no reply within {timeout_s:g} s"
        )

    def _outcome(self) -> T:
        if self._error is not None:
            raise self._error
        return cast("T", self._value)
