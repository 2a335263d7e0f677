"""What the buffer counts, for the line of each step and for `ratchet status`.

Consumes the group table's window and the workers' running totals, produces `BufferStats` and
totals; waits for nothing. What the fields mean: docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ratchet.actors.group_table import GroupTable
from ratchet.actors.window import Window
from ratchet.stats import BufferStats, Distribution
from ratchet.types import RoleInfo, RolloutStats


class Totals(NamedTuple):
    """Groups of this life of the buffer, for whatever reason."""

    dropped: int
    retried: int
    reissued: int

    def plus(self, window: Window) -> Totals:
        """Return them with those of a window."""
        return Totals(
            self.dropped + window.dropped.total(),
            self.retried + window.retried.total(),
            self.reissued + window.reissued.total(),
        )


class BufferCounts:
    """The windows of one table, and their sums."""

    def __init__(self, table: GroupTable) -> None:
        self._table = table
        self._workers: dict[str, RolloutStats] = {}
        self._totals = Totals(0, 0, 0)  # of the windows that were taken

    def heard(self, stats: RolloutStats) -> None:
        """Keep the newest totals of a worker."""
        self._workers[stats.worker] = stats

    def left(self, role: RoleInfo) -> None:
        """Forget a worker, unless another life of it has spoken since."""
        stats = self._workers.get(role.name)
        if stats is not None and stats.incarnation == role.incarnation:
            del self._workers[role.name]

    def totals(self) -> dict[str, int]:
        """Return what became of groups in this life of the buffer."""
        now = self._totals.plus(self._table.window)
        return {f"{name}_groups": number for name, number in now._asdict().items()}

    def take(
        self,
        staleness: tuple[int, ...],
        queue_staleness: Distribution,
        custom: Mapping[str, float],
    ) -> BufferStats:
        """Return the numbers beside a batch, and begin a new window."""
        table, window = self._table, self._table.take_window()
        self._totals = self._totals.plus(window)
        return BufferStats(
            queue_groups=table.num_queued,
            queue_bytes=table.queue.num_bytes,
            queue_staleness=queue_staleness,
            in_flight_groups=len(table.in_flight),
            staleness=staleness,
            rejected_staleness=window.rejected_staleness.read(),
            offered=window.offered.read(),
            trained=window.trained.read(),
            lost=window.lost.read(),
            requeued_groups=window.num_requeued,
            dropped=dict(window.dropped),
            retried=dict(window.retried),
            reissued=dict(window.reissued),
            masked=dict(window.masked),
            claim_to_finish_s=window.claim_to_finish.read(),
            finish_to_train_s=window.finish_to_train.read(),
            workers=tuple(self._workers.values()),
            custom=dict(custom),
        )
