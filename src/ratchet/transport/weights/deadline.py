"""One point in time for all the waits of a transfer. Waits for nothing itself."""

from __future__ import annotations

import time
from datetime import timedelta


class Deadline:
    """One point in time for all the waits of a transfer."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())

    @property
    def left(self) -> timedelta:
        """Time left; at least a millisecond, as torch takes zero for "no limit"."""
        return timedelta(seconds=max(self.left_s, 0.001))

    def within(self, seconds: float) -> Deadline:
        """Return a deadline for a part of it: so many seconds from now, or this one if that is
        sooner.
        """
        return Deadline(min(self.left_s, seconds))
