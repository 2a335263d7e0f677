"""Replays a trace through one policy: rollout workers and buffer as they are, a trainer of a few
lines, on virtual time. For the benchmark of policies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from benchmarks.policies_others import OtherBuffer
from benchmarks.policies_outcome import Outcome, Replayed, Step, Trained, outcome
from benchmarks.policies_trace import GROUP_SIZE, MEAN_S, Trace, TraceEngine, TraceScorer
from tests.helpers.actors import make_system
from tests.helpers.config import small_config
from tests.helpers.refs import RecordedDirectory
from tests.simulation.loop import run_virtual
from tests.simulation.weights import FakeReceiver, Wire

from ratchet.actors.actor import LocalRef
from ratchet.actors.buffer import BufferActor
from ratchet.actors.rollout import EngineReady, RolloutActor
from ratchet.backends.rollout.fake import NAME
from ratchet.config import Config
from ratchet.messages import (
    BatchReady,
    DescribeLineage,
    LineageDescribed,
    Message,
    RegisterRole,
    RequestBatch,
    RoleJoined,
    RoleRegistered,
    StepTrained,
    VersionUpdated,
)
from ratchet.staleness import Lineage, Position
from ratchet.storage.ledger import GroupLedger
from ratchet.types import Prompt, RoleInfo, RolloutGroup, VersionRecord

BATCH_GROUPS: Final = 16
WORKERS: Final = 4
SLOTS: Final = BATCH_GROUPS * GROUP_SIZE
"""samples that all engines decode at once"""
PUBLISH_S: Final = 2.0
"""from the end of a step until the engines have its weights; training goes on"""
WARM_UP: Final = 30
"""steps that are not counted: the first groups begin all at once"""
FOR_EVER: Final = 1e8

Make: TypeAlias = Callable[[int, int, int], OtherBuffer]


class Policy(NamedTuple):
    """What decides which prompts are issued, and which groups are trained."""

    name: str
    capacity_factor: float = 0.0
    """0: of the bound, as much as `admission` needs"""
    buffer: dict[str, Any] = {}
    other: Make | None = None
    """another system's, in place of ours"""
    is_bounded: bool = True


class Setting(NamedTuple):
    """Under which circumstances."""

    bound: int
    submission: str
    ratio: float
    """of the trainer's time for a batch to that of the engines, were all slots in use always"""
    num_steps: int


class World:
    """One run."""

    def __init__(self, policy: Policy, trace: Trace, setting: Setting) -> None:
        self.policy, self.trace, self.setting = policy, trace, setting
        self.config = _config(policy, setting)
        self.engines = [TraceEngine(trace) for _ in range(WORKERS)]
        self.workers: list[LocalRef] = []
        self.lineage = Lineage()
        self.steps: list[Step] = []
        self.name = "trainer-0"
        self._batches: asyncio.Queue[BatchReady] = asyncio.Queue()
        self._records = [VersionRecord(0, 1, 0, None, "live", "d")]
        """by version, which is the number of steps"""
        self._others = RecordedDirectory()
        self._others.refs["trainer-0"] = self  # type: ignore[assignment]
        self._others.ref("registry").answer = self._registry
        self._system = make_system(remote=self._others, log=_Silent())
        self.ledger = GroupLedger.open(None)

    def tell(self, message: Message) -> None:
        """Hear as the trainer."""
        assert isinstance(message, BatchReady)
        self._batches.put_nowait(message)

    def watch(self, watcher: object) -> None:
        """Nothing dies here."""

    def _registry(self, message: Message) -> Message:
        if isinstance(message, RegisterRole):
            return RoleRegistered((), tuple(self._records))
        assert isinstance(message, DescribeLineage)
        return LineageDescribed(tuple(self._records[each] for each in message.versions))

    async def run(self) -> Outcome:
        self.lineage.add(0, 0, None)
        buffer = self._start_buffer()
        for number, engine in enumerate(self.engines):
            await engine.write({NAME: np.zeros(4, np.float32)})
            await engine.stamp(0)
            worker = RolloutActor.start(
                self._system,
                RoleInfo("rollout", f"rollout-{number}", "1"),
                config=self.config,
                engine=engine,
                receiver=FakeReceiver(Wire()),
                scorer=TraceScorer(),
                eval_prompts=(),
            )
            worker.tell(RoleJoined(RoleInfo("buffer", "buffer", "1")))
            self.workers.append(worker)
        await self._train(buffer)
        seen = Replayed(
            self.trace,
            self.lineage,
            self.engines,
            SLOTS,
            self.steps,
            WARM_UP,
            asyncio.get_running_loop().time(),
        )
        row = outcome(seen, self._undecided())
        for worker in self.workers:
            await worker.stop(block=False)
        if self.policy.other is None:
            await buffer.stop(block=False)
        return row

    def _start_buffer(self) -> Any:
        if self.policy.other is not None:
            other = self.policy.other(BATCH_GROUPS, self.setting.bound, GROUP_SIZE)
            other.find = self._system.ref
            self._others.refs["buffer"] = other  # type: ignore[assignment]
            return other
        return BufferActor.start(
            self._system,
            RoleInfo("buffer", "buffer", "1"),
            config=self.config,
            prompts=[Prompt(f"p{i}", "p") for i in range(len(self.trace.lengths))],
            ledger=self.ledger,
        )

    async def _train(self, buffer: Any) -> None:
        loop = asyncio.get_running_loop()
        done, publishing = None, None
        for step in range(self.setting.num_steps):
            asked = loop.time()
            position = Position(step, step)
            buffer.tell(RequestBatch(self.name, 1, *position, done, "1"))
            async with asyncio.timeout(1000 * MEAN_S):  # or claims repeat for ever
                ready = await self._batches.get()
            waited_s = loop.time() - asked
            groups = [self._masked(group, position) for group in ready.batch.groups]
            await asyncio.sleep(self.setting.ratio * MEAN_S)
            trained = [Trained(group, position) for group in groups]
            self.steps.append(Step(waited_s, loop.time(), trained))
            ids = tuple(group.group_id for group in groups)
            done = StepTrained(1, step + 1, ids, {})
            buffer.tell(done)
            if publishing is not None:
                await publishing
            self._records.append(VersionRecord(step + 1, 1, step + 1, step, "reserved"))
            self.lineage.add(step + 1, step + 1, step)
            publishing = asyncio.create_task(self._publish(buffer, step + 1))
        assert publishing is not None
        await publishing

    def _masked(self, group: RolloutGroup, position: Position) -> RolloutGroup:
        if self.policy.buffer.get("unused") != "mask":
            return group
        masked = self.lineage.mask_stale(group, position, self.setting.bound)
        assert masked is not None
        return masked

    async def _publish(self, buffer: Any, step: int) -> None:
        await asyncio.sleep(PUBLISH_S)
        for engine in self.engines:
            await engine.stamp(step)
        record = VersionRecord(step, 1, step, step - 1, "live", "d")
        self._records[step] = record
        buffer.tell(VersionUpdated(record))
        for worker in self.workers:
            worker.tell(EngineReady())

    def _undecided(self) -> set[tuple[int, int]] | None:
        if self.policy.other is not None:
            return None  # they drop nothing
        return {(row.group_id, row.attempt) for row in self.ledger.groups("finished", "batched")}


class _Silent:
    def debug(self, event: str, **fields: Any) -> None: ...

    info = warning = error = debug


def _config(policy: Policy, setting: Setting) -> Config:
    bound = setting.bound if policy.is_bounded else 1_000_000
    return small_config(
        rollout={
            "group_size": GROUP_SIZE,
            "max_tokens": 5,
            "num_workers": WORKERS,
            "max_concurrent_groups": BATCH_GROUPS // WORKERS,
            "group_timeout_s": FOR_EVER,
            "submission": setting.submission,
        },
        buffer={
            "batch_groups": BATCH_GROUPS,
            "max_staleness": bound,
            "capacity_factor": policy.capacity_factor or setting.bound + 1.0,
            "lease_s": FOR_EVER,
            **policy.buffer,
        },
    )


def replay(policy: Policy, trace: Trace, setting: Setting) -> Outcome:
    """Run one policy."""

    async def main() -> Outcome:
        return await World(policy, trace, setting).run()

    return run_virtual(main())
