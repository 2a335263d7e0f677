"""Groups that go back to the queue from the disk, not to a worker.

Consumes what is finished, trained, given up or committed; produces groups that were issued again
although their result is there still: a buffer, a trainer or a step was lost, and not the group.
They wait here for room in the queue. Waits for the disk only to read one of them.

A trained group may have to come back as long as no checkpoint contains its step. From a checkpoint
of step s a trainer takes groups of versions up to step s + `max_staleness`, and a step trains none
that is more than `max_staleness` older than its weights: what was trained later than s + reach,
with reach = 2 `max_staleness` + 1, would be too stale. So payloads are kept of the steps that the
newest checkpoint reaches, and of the last ones, which the next checkpoint will reach: 2 reach steps
in all, however long the run and however rare its checkpoints.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import msgspec

from ratchet.observability.logs import Log
from ratchet.storage.payloads import Payloads
from ratchet.types import RolloutGroup

if TYPE_CHECKING:
    from ratchet.actors.entry import Entry
    from ratchet.storage.groups import GroupRow

COMES_BACK: Final = frozenset({"buffer_died", "trainer_died", "step_lost"})
"""Reasons for another attempt that say nothing against the result of the last one."""


class StoredGroups:
    """The payloads of a table's groups, and which of them wait to come back.

    Args:
        payloads: where they are; None to keep none.
        max_staleness: the buffer's.
        log: where it is said that payloads cannot be kept, and that they can again.
    """

    def __init__(
        self, payloads: Payloads | None = None, max_staleness: int = 0, log: Log | None = None
    ) -> None:
        self.saved_step = 0
        """of the newest whole checkpoint, as far as is known"""
        self._payloads = payloads
        self._reach = 2 * max_staleness + 1
        self._trained: dict[int, tuple[int, ...]] = {}  # by step, those beyond reach
        self._log = log
        self._failing = False
        self._waiting: deque[Entry] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def ids(self) -> frozenset[int]:
        """Of all groups whose payload is kept."""
        return frozenset() if self._payloads is None else frozenset(self._payloads.kept)

    def restore(self, saved_step: int, row_of: Callable[[int], GroupRow | None]) -> None:
        """Go on from an earlier life: forget the results that its ledger says are of no use."""
        self.saved_step = saved_step
        rows = {group_id: row_of(group_id) for group_id in self.ids}
        past = ("claimed", "committed", "dropped")
        self.forget([i for i, row in rows.items() if row is None or row.state in past])

    def keep(self, entry: Entry, group: RolloutGroup) -> None:
        """Keep what a group was when it finished."""
        if self._payloads is None:
            return
        self._payloads.put(group, entry.num_bytes)
        error, failing = self._payloads.error, self._failing
        self._failing = bool(error)
        if self._log is not None and failing != self._failing:
            event = "payloads_kept_again" if failing else "payloads_not_kept"
            self._log.warning(event, detail=error, num_failed=self._payloads.num_failed)

    def forget(self, group_ids: Iterable[int]) -> None:
        """Their results are not needed any more, or must not be used."""
        if self._payloads is not None:
            self._payloads.forget(group_ids)

    def trained(self, group_ids: Iterable[int], step: int) -> None:
        """Forget what no checkpoint will reach."""
        if step > self.saved_step + self._reach:
            self._trained[step] = tuple(group_ids)
            self.forget(self._trained.pop(step - self._reach, ()))

    def committed(self, group_ids: Iterable[int], step: int) -> None:
        """A checkpoint of this step has these groups."""
        self.forget(group_ids)
        self.saved_step = step
        reached = step + self._reach
        self._trained = {s: ids for s, ids in self._trained.items() if s > reached}

    def restarted(self, step: int) -> None:
        """A trainer goes on from a step, and trains those after it anew."""
        self.saved_step = min(self.saved_step, step)
        self._trained.clear()

    def recall(self, entry: Entry, reason: str) -> bool:
        """Let a group that is issued again wait here, if its result is worth it."""
        if self._payloads is None or entry.group_id not in self._payloads.kept:
            return False
        if reason not in COMES_BACK:
            self._payloads.forget([entry.group_id])
            return False
        self._waiting.append(entry)
        return True

    def read(self, entry: Entry) -> RolloutGroup | None:
        """Return what a group was when it finished; None if that is not kept."""
        if self._payloads is None:
            return None
        return self._payloads.get(entry.group_id, entry.attempt)

    def next(self) -> tuple[Entry, RolloutGroup | None]:
        """Return the group that has waited longest, as one of its new attempt; None for what cannot
        be read.
        """
        entry = self._waiting.popleft()
        if self._payloads is None:
            return entry, None
        group = self._payloads.get(entry.group_id, entry.attempt - 1)
        if group is None:
            self._payloads.forget([entry.group_id])
            return entry, None
        return entry, msgspec.structs.replace(group, attempt=entry.attempt)

    def close(self) -> None:
        """Write what is still to be written."""
        if self._payloads is not None:
            self._payloads.close()
