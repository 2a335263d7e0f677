"""The optimiser steps of a trainer, one at a time: judged, computed, applied, numbered, counted.

Consumes the groups of a batch, produces a `StepResult`; waits for

* `buffer.batch_filter`, the user's own code: fails the run after `trainer.batch_timeout_s`;
* the backend;
* the transfer of the previous version, only before the weights change: forward and backward overlap
  with it; ends by `weights.timeout_s`; with `weights.snapshot` the copy of its weights alone;
* the registry, for the number of the new weights (ask deadline).

A batch is judged again here, against the weights that take the step: until then nothing changes
them, and no verdict comes after this one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ratchet.actors.checkpointing import StartingPoint
from ratchet.actors.judgement import BatchFilter, Judgement, judge, mark
from ratchet.actors.publisher import Publisher
from ratchet.actors.step_metrics import StepResult, StepTimes
from ratchet.actors.weight_sync import WaitFunction, WeightSync
from ratchet.backends.training.base import TrainingBackend
from ratchet.config import Config
from ratchet.errors import RunFailed, StaleTerm
from ratchet.observability.logs import Log
from ratchet.staleness import Position, UnknownVersion
from ratchet.types import Prompt, RolloutGroup


class Optimisation:
    """Takes the steps, and counts them."""

    def __init__(
        self,
        config: Config,
        *,
        backend: TrainingBackend,
        publisher: Publisher,
        sync: WeightSync,
        batch_filter: BatchFilter | None,
        wait_for: WaitFunction,
        log: Log,
    ) -> None:
        self.num_steps = 0
        """taken so far, on the lineage of the weights in hand"""
        self.bad_steps = 0
        """skipped in a row"""
        self._config = config
        self._backend = backend
        self._publisher = publisher
        self._sync = sync
        self._batch_filter = batch_filter
        self._wait_for = wait_for
        self._log = log

    async def begin(self, start: StartingPoint | None, prompts: Sequence[Prompt]) -> None:
        """Load the weights that training starts from: the base model's, restored or warmed up."""
        await self._backend.start()
        if start is not None:
            await self._backend.restore(start.directory)
            self.num_steps = start.step
            self._log.info("restored", step=start.step, version=start.version)
        elif self._config.warm_start.steps:
            result = await self._backend.warm_start(prompts)
            self._log.info("warm_start_done", **result)

    async def take(self, groups: Sequence[RolloutGroup], times: StepTimes) -> StepResult:
        """Take a step on what is to be trained of a batch, or skip it.

        Raises:
            RunFailed: if the batch filter fails, or answers too late.
            StaleTerm: if another trainer has taken over.
        """
        position = self._publisher.position
        judged = await self._judge(groups, position)
        times.mark("judge_s")
        applied, reports = False, dict[str, float]()
        if judged.trained:
            applied, reports = await self._optimise(judged.groups, times)
        lineage = self._publisher.lineage
        versions = {version for group in judged.trained for version in group.versions}
        ages = {version: lineage.staleness(version, position) for version in versions}
        return StepResult(position.version, judged, ages, applied, reports)

    def count(self, result: StepResult, step: int) -> None:
        """Note how a step went.

        Raises:
            RunFailed: if it is the last of `trainer.max_bad_steps` in a row that were skipped.
        """
        self.bad_steps = 0 if result.applied else self.bad_steps + 1
        if result.applied:
            return
        groups = [group.group_id for group in result.judged.groups]
        reason = "non_finite" if result.judged.trained else "nothing_to_train"
        self._log.error("step_skipped", step=step, reason=reason, groups=groups)
        if self.bad_steps >= self._config.trainer.max_bad_steps:
            found = "were not finite" if result.judged.trained else "had no token to train"
            if result.judged.marked_samples:
                found += f" (buffer.batch_filter = {self._config.buffer.batch_filter!r})"
            msg = f"{self.bad_steps} steps in a row {found}; last groups: {groups}"
            raise RunFailed(msg)

    def close(self) -> None:
        """Let go of the batch filter."""
        if self._batch_filter is not None:
            self._batch_filter.close()

    async def _judge(self, groups: Sequence[RolloutGroup], position: Position) -> Judgement:
        buffer, lineage = self._config.buffer, self._publisher.lineage
        try:
            judged = judge(groups, lineage, position, buffer.max_staleness, mask=buffer.masks_stale)
        except UnknownVersion as error:  # all of this term and of those before it are known here
            msg = f"tokens of version {error} are not of term {self._publisher.term} or before it"
            raise StaleTerm(f"{msg}: another trainer has taken over") from None
        if self._batch_filter is None or not judged.groups:
            return judged
        marks = await self._wait_for(
            self._batch_filter.marks(judged.groups),
            on="buffer.batch_filter",
            what=f"the marks of step {self.num_steps + 1}",
            within_s=self._config.trainer.batch_timeout_s,
        )
        return mark(judged, marks)

    async def _optimise(
        self, groups: Sequence[RolloutGroup], times: StepTimes
    ) -> tuple[bool, dict[str, float]]:
        """Take the step, or skip it; only its second half waits for the transfer in flight."""
        gradients = await self._backend.forward_backward(groups)
        times.mark("train_s")
        if self._publisher.snapshot is None:
            await self._sync.transferred()
        async with self._publisher.changing():
            times.mark("publish_s")
            if not gradients.finite:
                await self._backend.skip_step()
                return False, dict(gradients.metrics)
            report = await self._backend.optimizer_step()
            times.mark("train_s")
            if report.applied:
                self.num_steps += 1
                # at once: the next batch is asked for by the number of the weights that train it
                await self._publisher.reserve(self.num_steps)
                times.mark("publish_s")
        return report.applied, {**gradients.metrics, **report.metrics}
