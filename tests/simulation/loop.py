"""An asyncio event loop whose time is virtual.

When nothing is ready, time jumps to the next timer instead of waiting for it, so that an hour of
timeouts passes in milliseconds, and passes the same way each time. When nothing is ready and no
timer is left, nothing can ever happen again: `Deadlock`. A simulation uses no threads: one that
calls in while the loop still has something to do is heard, but when is up to the scheduler.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):  # noqa: N818 - reads as the event it reports
    """Nothing is ready, no timer is left, and what was to be run is not done."""


class _JumpingSelector(selectors.DefaultSelector):
    """Polls the file descriptors; where it would wait, it moves the clock."""

    def __init__(self, explain: Callable[[], str]) -> None:
        super().__init__()
        self.now = 0.0
        self._explain = explain

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        if timeout is None:
            raise Deadlock(f"at {self.now:g} s nothing can happen any more\n{self._explain()}")
        self.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s.

    Args:
        explain: called on a deadlock; its text becomes part of the error, for instance the table of
            waits. By default the names of the pending tasks.
    """

    def __init__(self, explain: Callable[[], str] | None = None) -> None:
        self._virtual = _JumpingSelector(explain or self._pending)
        super().__init__(self._virtual)

    def time(self) -> float:
        """Virtual seconds."""
        return self._virtual.now

    def _pending(self) -> str:
        return "pending: " + ", ".join(sorted(t.get_name() for t in asyncio.all_tasks(self)))


def run_virtual(main: Coroutine[Any, Any, T], *, explain: Callable[[], str] | None = None) -> T:
    """`asyncio.run` in virtual time.

    Raises:
        Deadlock: `main` waits for something that can never happen.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(explain)) as runner:
        return runner.run(main)
