"""Calls of the verifiers library's coroutines, and of what it does to a process.

Consumes coroutines, produces their results; waits for them, on an event loop of the calling thread.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class Loops:
    """One loop a thread: clients that an environment keeps belong to the loop they began on."""

    def __init__(self) -> None:
        self._threads = threading.local()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what the coroutine returns, on the loop of this thread."""
        runner: _Runner | None = getattr(self._threads, "runner", None)
        if runner is None:
            runner = self._threads.runner = _Runner()
        return runner.run(work)


class _Runner:
    """A loop that ends with its thread, or with the environment."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def __del__(self) -> None:
        self._runner.close()


@contextmanager
def signals_kept() -> Iterator[None]:
    """Take back what an environment's construction does with the process's signals."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
