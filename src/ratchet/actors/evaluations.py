"""When to evaluate which version on which engines: before, beside and after training.

Consumes versions as they go live; produces `Evaluation`s, one at a time, a line of output and an
event each. Waits, in a task of its own, for engines that evaluate, until `eval.timeout_s`; training
waits for none of it. What unblocks it: the engines' replies, or their deadline.

An engine that evaluates is pinned: the publisher offers it no newer version until it is done or is
given up, and then it catches up point to point. On shared engines at most half of the holders are
lent, so that the others go on with new versions; a single one is lent as a whole. Engines of its
own (`eval.engines = "own"`) take part in no transfer to all: they are brought to the version that
is live by catching up, which gives way to training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from ratchet.actors.evaluation import Evaluation
from ratchet.actors.publisher import Publisher
from ratchet.actors.weight_sync import SpawnFunction
from ratchet.config import Config
from ratchet.observability.logs import Log
from ratchet.types import PolicyVersion, RoleInfo

_RETRY_S: Final = 1.0


class EvaluateFunction(Protocol):
    """`evaluation.evaluate`, but for what is the same for all evaluations of a run."""

    def __call__(
        self,
        version: PolicyVersion,
        engines: Sequence[RoleInfo],
        *,
        ended: Callable[[RoleInfo], None],
    ) -> Awaitable[Evaluation]:
        """Score a version."""
        ...


class Evaluations:
    """The evaluations of a run, as its trainer sees them. Implements `Pins` of the publisher.

    Args:
        config: of the run.
        publisher: says which version is live, and keeps to what is pinned.
        evaluate: scores a version on engines, and tells of each engine as it is done.
        spawn: runs an evaluation beside training.
        now: the clock.
        log: told of each evaluation, and of each that is skipped.
        write: takes the line of each evaluation.
        released: told of each engine that is pinned no more.
    """

    def __init__(
        self,
        config: Config,
        *,
        publisher: Publisher,
        evaluate: EvaluateFunction,
        spawn: SpawnFunction,
        now: Callable[[], float],
        log: Log,
        write: Callable[[Mapping[str, Any]], None],
        released: Callable[[RoleInfo], None],
    ) -> None:
        self._config = config.eval
        self._last_step = config.trainer.num_steps
        self._publisher = publisher
        publisher.pins = self
        self._evaluate = evaluate
        self._spawn = spawn
        self._now = now
        self._log = log
        self._write = write
        self._released = released
        self._own: dict[str, RoleInfo] = {}
        self._pinned: set[RoleInfo] = set()
        self._running: asyncio.Task[Evaluation | None] | None = None
        self._period: int | None = None  # of `every_steps` each: the last that one was due in
        self.num_skipped = 0
        """Evaluations that were due and not begun, since the start."""

    @property
    def running(self) -> bool:
        """Whether one goes on beside training."""
        return self._running is not None and not self._running.done()

    def joined(self, engine: RoleInfo) -> None:
        """Note an engine that does nothing but evaluate."""
        self._own[engine.name] = engine

    def left(self, engine: RoleInfo) -> None:
        """Forget it, unless it is back already in another life."""
        if self._own.get(engine.name) == engine:
            del self._own[engine.name]

    def pinned(self, engine: RoleInfo) -> bool:
        """Whether it must keep the version that it holds."""
        return engine in self._pinned

    def live(self, version: PolicyVersion, holders: Sequence[RoleInfo]) -> None:
        """Begin the evaluation that is due with this version, if one is.

        The publisher calls it before it offers any engine another version. The first version and
        the last one are left to `run`, before and after training.
        """
        if not self._config.every_steps:
            return
        step = self._publisher.lineage.step(version)
        period, before = step // self._config.every_steps, self._period
        if before is None or period > before:
            self._period = period
        if before is None or period <= before or step >= self._last_step:
            return
        if self.running:
            self._skip(version, "the one before still runs")
        elif self._config.engines == "own":
            self._running = self._spawn(self._on_own(version), name=f"evaluate-{version}")
        else:
            lent = sorted(holders, key=lambda engine: engine.name)[: max(1, len(holders) // 2)]
            self._pinned.update(lent)
            self._running = self._spawn(self.run(version, lent), name=f"evaluate-{version}")

    async def ended(self) -> None:
        """Wait for the one that goes on beside training, if there is one."""
        if self._running is not None:
            await self._running

    async def whole(self) -> Evaluation | None:
        """Evaluate the live version on all engines that hold it, before or after training."""
        publisher = self._publisher
        if not self._config.num_prompts or publisher.live is None:
            return None
        engines = sorted(publisher.holders.values(), key=lambda engine: engine.name)
        return await self.run(publisher.live, engines)

    async def run(self, version: PolicyVersion, engines: Sequence[RoleInfo]) -> Evaluation | None:
        """Evaluate a version on engines that hold it; None if no prompt could be scored."""
        started = self._now()
        evaluation = await self._evaluate(version, engines, ended=self._release)
        line = evaluation.line() | {
            "step": self._publisher.lineage.step(version),
            "seconds": round(self._now() - started, 4),
            "num_engines": len(engines),
            "num_skipped": self.num_skipped,
        }
        self._log.info("evaluated", **line)
        self._write(line)
        return None if evaluation.accuracy is None else evaluation

    async def _on_own(self, due: PolicyVersion) -> Evaluation | None:
        """Bring the engines that only evaluate to the newest version that they get, and use it."""
        until = self._now() + self._config.timeout_s
        held: dict[PolicyVersion, list[RoleInfo]] = {}
        while not held and self._now() < until:
            tried: PolicyVersion | None = None
            for engine in tuple(self._own.values()):
                published = await self._publisher.catch_up(engine)
                tried = None if published is None else published.version
                if published is not None and engine.name in published.loaded:
                    held.setdefault(published.version, []).append(engine)
            # after a step that was first, the next version is tried as soon as it is live
            if not held and (not self._own or tried == self._publisher.live):
                await asyncio.sleep(_RETRY_S)
        if not held:
            self._skip(due, "no engine of its own took a version in time")
            return None
        version = max(held)
        return await self.run(version, held[version])

    def _release(self, engine: RoleInfo) -> None:
        if engine in self._pinned:
            self._pinned.remove(engine)
            self._released(engine)

    def _skip(self, version: PolicyVersion, reason: str) -> None:
        self.num_skipped += 1
        step = self._publisher.lineage.step(version)
        self._log.warning("evaluation_skipped", version=version, step=step, reason=reason)
