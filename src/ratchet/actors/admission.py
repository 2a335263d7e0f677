"""How many prompts may be issued now.

Pure: consumes the configuration, counts and the sizes of what has finished; produces a number of
groups; waits for nothing. Room is given out at the issue and never taken back, so whoever finishes
has a place. The least of three caps holds for the groups that are open, in flight and finished:

* `capacity`: floor(capacity_factor x batch_groups) groups.
* `max_bytes`: the finished groups' payloads, and for each group in flight as much as the largest
  that has finished in this life of the buffer. It is a cap on issue, and gives way twice. One batch
  is always let in, or no step could be taken: what is open may be one batch of any size. And a
  group may turn out larger than all before it: then what is open exceeds `max_bytes` by at most
  that difference for each group that was in flight. The first size is known with the first finish;
  until then no more than one batch is let in.
* bounded: `staleness.most_open`, for `admission = "bounded"` with the bound `max_staleness`, and
  for a synchronous trainer with the bound 0. The place of a group in the capacity is then free
  when the version trained on it is there.
"""

from __future__ import annotations

from typing import NamedTuple

from ratchet.config import BufferConfig
from ratchet.staleness import most_open
from ratchet.types import RolloutGroup


class OpenGroups(NamedTuple):
    """What holds room now."""

    num_in_flight: int
    num_queued: int
    queued_bytes: int
    largest_bytes: int = 0
    """of all groups that have finished so far; 0 if none has"""

    @property
    def num(self) -> int:
        """All of them."""
        return self.num_in_flight + self.num_queued


class Admission:
    """The caps of one run."""

    def __init__(self, config: BufferConfig, *, synchronous: bool) -> None:
        self._batch_groups = config.batch_groups
        self._capacity = config.capacity
        self._max_bytes = config.max_bytes
        self._bound = _bound(config, synchronous=synchronous)

    @property
    def is_bounded(self) -> bool:
        """Room depends on the versions that the workers hold."""
        return self._bound is not None

    def room(self, groups: OpenGroups, staleness: int = 0) -> int:
        """Return how many groups may be issued now; never negative.

        Args:
            groups: what is open.
            staleness: for the next batch, of the version that the worker holds which they are
                issued to. Only a bounded admission asks for it.
        """
        most = self._capacity
        if self._bound is not None:
            most = most_open(self._batch_groups, self._bound, self._capacity, staleness)
        if self._max_bytes is not None:
            most = min(most, max(self._batch_groups, self._most_by_size(groups, self._max_bytes)))
        return max(0, most - groups.num)

    def _most_by_size(self, groups: OpenGroups, max_bytes: int) -> int:
        if not groups.largest_bytes:
            return 0
        left = max(0, max_bytes - groups.queued_bytes)
        return groups.num_queued + left // groups.largest_bytes


def payload_bytes(group: RolloutGroup) -> int:
    """Return the bytes of all arrays of a group."""
    return sum(
        len(rollout.prompt_ids.data)
        + len(rollout.completion_ids.data)
        + len(rollout.behavior_logprobs.data)
        + len(rollout.loss_mask.data)
        for rollout in group.rollouts
    )


def _bound(config: BufferConfig, *, synchronous: bool) -> int | None:
    if synchronous:
        return 0
    return config.max_staleness if config.admission == "bounded" else None
