"""The prompts that a producer holds under a lease: those that lie here, and those that were taken.

Consumes assignments of the buffer, each with its lease; produces them one at a time, and the total
that `ClaimPrompts` carries. `take` waits for a prompt whose lease is still good; unblocked by
`put`. The total never falls during a life of the buffer, so it is safe to repeat, to lose and to
reorder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ratchet.types import Assignment


class Leases:
    """What one producer has been handed.

    Args:
        now: the clock.
        ahead: prompts that are claimed before they are asked for.
    """

    def __init__(self, now: Callable[[], float], *, ahead: int) -> None:
        self._now = now
        self._ahead = ahead
        self._here: asyncio.Queue[tuple[Assignment, float]] = asyncio.Queue()  # lease ends at
        self._taken: dict[tuple[int, int], tuple[float, float]] = {}  # taken at, lease ends at
        self._lapsed: dict[tuple[int, int], float] = {}  # taken at; their end may still come
        self._buffer = ""  # the life of the buffer that the next two count for
        self._received = 0
        self._credit = 0
        self.busy_s = 0.0
        """from the taking of a group to its end, of all groups together"""

    @property
    def num_here(self) -> int:
        """Prompts that nobody has taken."""
        return self._here.qsize()

    @property
    def num_taken(self) -> int:
        """Groups that were taken, have not ended, and are under a lease."""
        self._let_lapse()
        return len(self._taken)

    def count_for(self, buffer: str) -> None:
        """Begin a new count if this is another life of the buffer: it issues again what is here."""
        if buffer == self._buffer:
            return
        self._buffer, self._received, self._credit = buffer, 0, 0
        self._taken.clear()
        self._lapsed.clear()
        while not self._here.empty():
            self._here.get_nowait()

    def claim(self, num_waiting: int) -> int:
        """Raise the running total so that each who waits gets a prompt, and `ahead` are here.

        The buffer gives the credit of a lapsed group back, until its late end comes.
        """
        self._let_lapse()
        missing = num_waiting + self._ahead - self.num_here
        received = self._received - len(self._lapsed)
        self._credit = max(self._credit, received + max(0, missing))
        return self._credit

    def put(self, assignment: Assignment) -> None:
        """Hold a prompt that has come; its lease begins now."""
        self._received += 1
        self._here.put_nowait((assignment, self._now() + assignment.lease_s))

    async def take(self) -> Assignment:
        """Wait for a prompt under a lease."""
        while True:
            assignment, lease_end = await self._here.get()
            if self._now() < lease_end:
                self._taken[assignment.group_id, assignment.attempt] = (self._now(), lease_end)
                return assignment
            self._received -= 1  # it lay here too long: the buffer has its credit back

    def end(self, group_id: int, attempt: int) -> bool:
        """Note the end of a group; tell whether its lease was still good."""
        self._let_lapse()
        now, key = self._now(), (group_id, attempt)
        is_good = key in self._taken
        taken_at = self._taken.pop(key)[0] if is_good else self._lapsed.pop(key, now)
        self.busy_s += now - taken_at
        return is_good

    def _let_lapse(self) -> None:
        now = self._now()
        for key, (taken_at, lease_end) in list(self._taken.items()):
            if lease_end <= now:
                del self._taken[key]
                self._lapsed[key] = taken_at
