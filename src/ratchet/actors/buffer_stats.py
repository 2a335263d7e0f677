"""What the buffer counts, for the line of each step and for `ratchet status`.

Consumes the group table's counters and the workers' running totals, produces `BufferStats` and
totals; waits for nothing.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping

from ratchet.actors.group_table import GroupTable
from ratchet.types import BufferStats, RoleInfo, RolloutStats


class BufferCounts:
    """The windows of one table, and their sums."""

    def __init__(self, table: GroupTable) -> None:
        self._table = table
        self._workers: dict[str, RolloutStats] = {}
        self._totals: Counter[str] = Counter()  # of the windows that were taken

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
        now = self._totals + self._window_totals()
        return {f"{name}_groups": now[name] for name in ("dropped", "retried", "reissued")}

    def take(self, staleness: tuple[int, ...], custom: Mapping[str, float]) -> BufferStats:
        """Return the numbers beside a batch, and begin a new window."""
        self._totals += self._window_totals()
        window = self._table.take_window()
        rewards = window.finished_rewards
        return BufferStats(
            queue_groups=self._table.num_queued,
            in_flight_groups=self._table.num_in_flight,
            staleness=staleness,
            dropped=dict(window.dropped),
            retried=window.retried.total(),
            masked=dict(window.masked),
            leases_expired=window.reissued.total(),
            workers=tuple(self._workers.values()),
            finished_groups=len(rewards),
            finished_reward_mean=statistics.fmean(rewards) if rewards else None,
            queue_bytes=self._table.queue.num_bytes,
            custom=dict(custom),
        )

    def _window_totals(self) -> Counter[str]:
        window = self._table.window
        return Counter(
            dropped=window.dropped.total(),
            retried=window.retried.total(),
            reissued=window.reissued.total(),
        )
