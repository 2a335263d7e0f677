"""A daemon thread for blocking calls, so that they never run on the event loop.

Consumes calls, runs them one after another, produces futures. A call that is stuck can be left
behind: the thread ends with it, and does not keep the process alive, as the threads of an executor
would.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Final, TypeVar

T = TypeVar("T")
_EXIT_S: Final = 5.0
_stopped: Final[set[threading.Thread]] = set()
"""threads that were told to end and have not yet"""


@atexit.register
def _wait_for_stopped() -> None:
    """Let threads that were told to end do so: an interpreter that ends below a thread in torch's
    code aborts the process. One that is stuck for good is left to its fate.
    """
    end = time.monotonic() + _EXIT_S
    for thread in list(_stopped):
        thread.join(max(0.0, end - time.monotonic()))


class Worker:
    """One thread, started with the first call, stopped by `stop`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Run a call after the earlier ones. Cancelling the future stops nothing: whoever is told
        of the call by its side effects must be told in any case.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            try:
                settle = partial(_succeed, future, call())
            except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
                settle = partial(_fail, future, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits any more
                loop.call_soon_threadsafe(settle)

        self._put(job)
        return future

    def stop(self, last: Callable[[], object]) -> None:
        """Run `last` after what is queued, then end the thread. Returns at once."""
        if self._thread is None:
            return
        _stopped.add(self._thread)
        self._put(last)
        self._put(None)

    def _put(self, call: Callable[[], object] | None) -> None:
        self._calls.put(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()

    def _loop(self) -> None:
        _wake_quietly()
        while (call := self._calls.get()) is not None:
            call()
            del call  # or the last call would keep its tensors and its group alive
        _stopped.discard(threading.current_thread())


def _wake_quietly() -> None:
    """Have this thread, and gloo's, which it starts, put aside no other when they wake: each piece
    of a bucket wakes several, and what they interrupt (digests, training) costs more than they wait
    (sched(7), SCHED_BATCH). Whoever chose another policy for this process keeps it.
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # a sandbox that forbids it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
