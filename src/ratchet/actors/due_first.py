"""Which finished groups the next batch takes under a bounded admission: what must go, and else the
first to finish.

Consumes the group table and where the batch is trained, produces the ids of the batch, or nothing
while a group that must be in it is in flight; pure, and waits for nothing itself. What unblocks it:
that group's finish, failure or lease. Why that is enough: `ratchet.staleness`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ratchet.actors.group_table import GroupTable
from ratchet.config import BufferConfig
from ratchet.staleness import Lineage, Position, first_batch, must_go
from ratchet.types import PolicyVersion


class DueFirst:
    """The order of training that keeps every group within the bound."""

    def __init__(self, config: BufferConfig, table: GroupTable, lineage: Lineage) -> None:
        self._size = config.batch_groups
        self._bound = config.max_staleness
        self._table = table
        self._lineage = lineage

    def choose(self, position: Position) -> Sequence[int]:
        """Return the ids of a batch to be trained at a position, oldest finish first; or nothing.

        Past the bound, which is outside the proof, a finished group goes as one at the bound, and
        one in flight is not waited for: the verdict will be against it.
        """
        queue = self._table.queue
        bases = self._table.in_flight.bases
        if self._lineage.unknown(bases):
            return ()  # until the registry has said how old those in flight are
        age_of = {versions: self._age(versions, position) for versions in queue.sets_of_versions()}
        ages: Counter[int] = Counter()
        for versions, age in age_of.items():
            ages[age] += queue.num_made_by(versions)
        for base, number in bases.items():
            if (age := self._lineage.staleness(base, position)) <= self._bound:
                ages[age] += number
        needed = must_go(self._size, self._bound, ages)
        batch = first_batch(self._size, needed, (age_of[entry.versions] for entry in queue))
        if batch is None:
            return ()
        ids = list(queue.groups)
        return [ids[index] for index in batch]

    def _age(self, versions: tuple[PolicyVersion, ...], position: Position) -> int:
        oldest = max((self._lineage.staleness(each, position) for each in versions), default=0)
        return min(oldest, self._bound)
