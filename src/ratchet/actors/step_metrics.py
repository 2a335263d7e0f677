"""One line of metrics a step, from what the trainer timed and what the buffer counted.

Pure: consumes times, a batch, the buffer's statistics and the backend's reports; produces one flat
dictionary; waits for nothing. Field names and units: docs/metrics.md.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ratchet.actors.transfer import Transferred
from ratchet.backends.training.base import TrainingBackend
from ratchet.types import BufferStats, PolicyVersion, RolloutGroup, RolloutStats


def sync_metrics(done: Transferred, snapshot_s: float) -> dict[str, float | None]:
    """Return what a transfer cost; seconds of the engines are of the slowest. The sender's part is
    null if it was given up after an engine had everything.
    """
    sent, loaded = done.sent, done.loaded.values()
    return {
        "weights/version": done.version,
        "weights/sent_bytes": sent and sent.num_bytes,
        "weights/num_buckets": sent and sent.num_buckets,
        "weights/snapshot_s": snapshot_s,
        "weights/gather_s": sent and sent.gather_s,
        "weights/move_s": sent and sent.move_s,
        "weights/load_s": max(reply.load_s for reply in loaded),
        "weights/paused_s": max(reply.paused_s for reply in loaded),
        "weights/num_loaded": len(done.loaded),
        "weights/num_failed": len(done.failed),
    }


class TrainerOutput(Protocol):
    """Where the trainer writes: the run directory, or a list in a test."""

    def step(self, metrics: Mapping[str, Any]) -> None:
        """One line of metrics."""
        ...

    def summary(self, summary: Mapping[str, Any]) -> None:
        """How the run ended."""
        ...

    async def model(self, backend: TrainingBackend) -> None:
        """Write the trained model."""
        ...


class StepTimes:
    """Splits the time of one step; each mark charges what has passed since the last one."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.started = self._last = now()
        self.parts: defaultdict[str, float] = defaultdict(float)

    def mark(self, part: str) -> None:
        """Charge the time since the last mark to `part`."""
        now = self._now()
        self.parts[part] += now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Seconds from the start to the last mark."""
        return self._last - self.started


class StepMetrics:
    """Remembers the last totals of each worker, to take differences."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._started = self._read_at = 0.0
        self._workers: dict[str, RolloutStats] = {}
        self._sync: Mapping[str, float | None] = {"sync_s": 0.0}
        self._num_caught_up = 0

    def start(self) -> None:
        """Start the clock of the run."""
        self._started = self._read_at = self._now()

    def synced(self, seconds: float, metrics: Mapping[str, float | None]) -> None:
        """Note the last sync of all engines; `seconds` from its transfer to its commit."""
        self._sync = {"sync_s": seconds, **metrics}

    def caught_up(self) -> None:
        """Note that one engine got the live version after the others."""
        self._num_caught_up += 1

    def line(
        self,
        *,
        step: int,
        version: PolicyVersion,
        groups: Sequence[RolloutGroup],
        stats: BufferStats,
        times: StepTimes,
        reports: Mapping[str, float],
        applied: bool,
    ) -> dict[str, Any]:
        """Return the line of one step; `version` is the one that took the step."""
        rewards = [reward for group in groups for reward in group.rewards]
        step_s = max(times.total, 1e-9)
        return {
            "step": step,
            "version": version,
            "time_s": round(self._now() - self._started, 4),
            "applied": applied,
            "reward_mean": statistics.fmean(rewards),
            "reward_std": statistics.pstdev(rewards),
            "finished_reward_mean": stats.finished_reward_mean,
            "finished_groups": stats.finished_groups,
            "staleness_mean": statistics.fmean(stats.staleness),
            "staleness_max": max(stats.staleness),
            "staleness_histogram": {str(k): n for k, n in sorted(Counter(stats.staleness).items())},
            "two_version_rollouts": sum(
                rollout.min_version != rollout.max_version for g in groups for rollout in g.rollouts
            ),
            "num_groups": len(groups),
            "num_tokens": sum(group.num_tokens for group in groups),
            "queue_groups": stats.queue_groups,
            "in_flight_groups": stats.in_flight_groups,
            "dropped": stats.dropped,
            "retried": stats.retried,
            "leases_expired": stats.leases_expired,
            "trainer_busy_share": times.parts["train_s"] / step_s,
            **self._rollouts(stats.workers),
            "step_s": step_s,
            "wait_s": times.parts["wait_s"],
            "train_s": times.parts["train_s"],
            "publish_s": times.parts["publish_s"],
            **self._syncs(),
            **reports,
        }

    def _syncs(self) -> dict[str, float | None]:
        num_caught_up, self._num_caught_up = self._num_caught_up, 0
        return {**self._sync, "weights/num_caught_up": num_caught_up}

    def _rollouts(self, workers: Sequence[RolloutStats]) -> dict[str, float]:
        shares, tokens = [], 0
        for now in workers:
            before = self._workers.get(now.worker)
            if before is None or before.incarnation != now.incarnation:
                before = RolloutStats(now.worker, now.incarnation)
            tokens += now.generated_tokens - before.generated_tokens
            if now.uptime_s > before.uptime_s:
                shares.append((now.busy_s - before.busy_s) / (now.uptime_s - before.uptime_s))
            self._workers[now.worker] = now
        elapsed = self._now() - self._read_at
        self._read_at = self._now()
        return {
            "rollout_busy_share": statistics.fmean(shares) if shares else 0.0,
            "tokens_per_s": tokens / elapsed if elapsed > 0 else 0.0,
        }
