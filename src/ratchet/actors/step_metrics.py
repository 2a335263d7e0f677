"""One line of metrics a step, from what the trainer timed and what the buffer counted.

Pure: consumes times, a batch, the buffer's statistics and the backend's reports; produces one flat
dictionary; waits for nothing. Field names and units: docs/metrics.md.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ratchet.actors.buffer_metrics import buffer_metrics, consumed_staleness
from ratchet.actors.judgement import Judgement
from ratchet.actors.transfer import Transferred
from ratchet.backends.training.base import TrainingBackend
from ratchet.stats import BufferStats
from ratchet.types import PolicyVersion, RolloutStats


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


class StepResult(NamedTuple):
    """What became of one batch."""

    version: PolicyVersion
    """of the weights that took the step"""
    judged: Judgement
    ages: Mapping[PolicyVersion, int]
    """staleness of each version of `judged.trained`, in optimiser steps"""
    applied: bool
    """whether the weights have changed"""
    reports: Mapping[str, float]
    """of the backend"""

    @property
    def trained(self) -> tuple[int, ...]:
        """Ids of the groups that the weights have learnt from."""
        return tuple(group.group_id for group in self.judged.trained) if self.applied else ()

    @property
    def rejected(self) -> dict[int, str]:
        """The other groups, and why they were not trained."""
        lost = () if self.applied else self.judged.trained
        return {**self.judged.rejected, **{group.group_id: "non_finite" for group in lost}}


class TrainerOutput(Protocol):
    """Where the trainer writes: the run directory, or a list in a test."""

    def begin(self, step: int) -> None:
        """Training begins, or goes on, behind this step; what was written past it is lost."""
        ...

    def step(self, metrics: Mapping[str, Any]) -> None:
        """One line of metrics."""
        ...

    def evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """One evaluation of one version."""
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
        step: int,
        result: StepResult,
        *,
        stats: BufferStats,
        times: StepTimes,
    ) -> dict[str, Any]:
        """Return the line of one step. Means and maxima of nothing are null."""
        judged = result.judged
        trajectories = [each for group in judged.trained for each in group.trained_trajectories]
        rollouts = [each for trajectory in trajectories for each in trajectory]
        rewards = [trajectory[0].reward for trajectory in trajectories]
        step_s = max(times.total, 1e-9)
        return {
            "step": step,
            "version": result.version,
            "time_s": round(self._now() - self._started, 4),
            "applied": result.applied,
            "reward_mean": statistics.fmean(rewards) if rewards else None,
            "reward_std": statistics.pstdev(rewards) if rewards else None,
            "num_groups": len(judged.trained),
            "num_tokens": sum(rollout.num_trained_tokens for rollout in rollouts),
            "buffer/masked_groups": judged.masked_groups,
            "buffer/masked_tokens": judged.masked_tokens,
            "buffer/marked_samples": judged.marked_samples,
            **consumed_staleness(judged.trained, result.ages),
            **buffer_metrics(stats),
            "trainer_busy_share": times.parts["train_s"] / step_s,
            **self._rollouts(stats.workers),
            "step_s": step_s,
            "wait_s": times.parts["wait_s"],
            "train_s": times.parts["train_s"],
            "publish_s": times.parts["publish_s"],
            **self._syncs(),
            **result.reports,
        }

    def _syncs(self) -> dict[str, float | None]:
        num_caught_up, self._num_caught_up = self._num_caught_up, 0
        return {**self._sync, "weights/num_caught_up": num_caught_up}

    def _rollouts(self, workers: Sequence[RolloutStats]) -> dict[str, float]:
        shares, starved, tokens = [], [], 0
        for now in workers:
            before = self._workers.get(now.worker)
            if before is None or before.incarnation != now.incarnation:
                before = RolloutStats(now.worker, now.incarnation)
            tokens += now.generated_tokens - before.generated_tokens
            if (seconds := now.uptime_s - before.uptime_s) > 0:
                shares.append((now.busy_s - before.busy_s) / seconds)
                starved.append((now.starved_s - before.starved_s, seconds))
            self._workers[now.worker] = now
        elapsed = self._now() - self._read_at
        self._read_at = self._now()
        return {
            "rollout_busy_share": statistics.fmean(shares) if shares else 0.0,
            "buffer/worker_wait_s": sum(waited for waited, _ in starved),
            "buffer/worker_wait_share": statistics.fmean(a / b for a, b in starved or [(0.0, 1.0)]),
            "tokens_per_s": tokens / elapsed if elapsed > 0 else 0.0,
        }
