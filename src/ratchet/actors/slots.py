"""The slots of one rollout worker: how many groups it may have been handed by now.

Pure: consumes the begin and the end of groups and of their samples, produces the running total that
`ClaimPrompts` carries; waits for nothing. The total never falls during a life of the buffer, so it
is safe to repeat, to lose and to reorder.

A worker has `groups` x `group_size` slots, one for each sample that its engine makes. By "group"
all slots of a group are free when it ends; by "sample" each is free when its sample ends, all but
the last, which is free when the group does (it is still being scored). So there are never more
samples in flight than slots, and by "sample" at most `groups` x `group_size` groups: as many as
there are slots, each with one long sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_BACKOFF_S: Final = 0.05
_MOST_BACKOFF_S: Final = 10.0


class Slots:
    """What one worker has been handed, and what has ended there.

    Args:
        groups: whole groups that the slots have room for.
        group_size: samples, or trajectories, of a group.
        per_sample: whether a slot is free as soon as its sample ends.
    """

    def __init__(self, *, groups: int, group_size: int, per_sample: bool) -> None:
        self.per_sample = per_sample
        self._groups = groups
        self._group_size = group_size
        self._held: dict[int, int] = {}  # ticket of a group in flight -> slots it holds
        self._num_begun = 0
        self._num_free_again = 0  # slots, all in all
        self._buffer = ""
        self._num_before = 0  # groups that earlier lives of the buffer handed over
        self.num_finished = 0
        self.num_failed = 0
        self._failures_in_a_row = 0

    def count_for(self, buffer: str) -> None:
        """Begin a new count if this is another life of the buffer: it knows of none of the groups
        that have begun, and each slot that one of them holds is free for it once that has ended.
        """
        if buffer != self._buffer:
            self._buffer, self._num_before = buffer, self._num_begun

    @property
    def credit(self) -> int:
        """Groups that this life of the buffer may have handed over."""
        return self._groups + self._num_free_again // self._group_size - self._num_before

    @property
    def has_credit(self) -> bool:
        """Whether another group may come."""
        return self._num_begun - self._num_before < self.credit

    @property
    def num_in_flight(self) -> int:
        """Groups that have not ended."""
        return len(self._held)

    @property
    def rest_s(self) -> float | None:
        """Pause before the next claim, in seconds: what fails at once must not eat the data as fast
        as it can. None as long as not more groups in a row have failed than there is room for.
        """
        excess = self._failures_in_a_row - self._groups
        return min(_MOST_BACKOFF_S, _BACKOFF_S * 2.0 ** min(excess, 16)) if excess > 0 else None

    def begin(self) -> int:
        """Give a group its slots; return its ticket."""
        self._num_begun += 1
        self._held[self._num_begun] = self._group_size
        return self._num_begun

    def end_sample(self, ticket: int) -> bool:
        """Note the end of a sample; tell whether there is credit for another group now."""
        if not self.per_sample or self._held.get(ticket, 1) == 1:
            return False
        self._held[ticket] -= 1
        before = self.credit
        self._num_free_again += 1
        return self.credit > before and self.rest_s is None

    def end(self, ticket: int, *, finished: bool) -> None:
        """Take back what a group still holds."""
        self._num_free_again += self._held.pop(ticket)
        if finished:
            self.num_finished += 1
            self._failures_in_a_row = 0
        else:
            self.num_failed += 1
            self._failures_in_a_row += 1


class Stopwatch:
    """Adds up the times in which something was so."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._last = now()
        self.seconds = 0.0

    def tick(self, was_so: bool) -> None:
        """Say whether it was so since the last tick."""
        now = self._now()
        if was_so:
            self.seconds += now - self._last
        self._last = now
