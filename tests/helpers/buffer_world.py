"""A buffer actor in virtual time; registry, worker and trainer are recorders."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.actors import make_system
from tests.helpers.config import small_config
from tests.helpers.refs import RecordedDirectory, RecordedRef
from tests.simulation.loop import run_virtual

from ratchet.actors.buffer import BufferActor
from ratchet.messages import (
    BatchReady,
    ClaimPrompts,
    DescribeLineage,
    GroupFailed,
    GroupFinished,
    LineageDescribed,
    Message,
    PromptsClaimed,
    RegisterRole,
    RequestBatch,
    RoleRegistered,
)
from ratchet.storage.ledger import GroupLedger
from ratchet.storage.payloads import Payloads
from ratchet.types import (
    Assignment,
    Packed,
    Prompt,
    RoleInfo,
    Rollout,
    RolloutGroup,
    RolloutStats,
    VersionRecord,
    VersionSpan,
)

WORKER = RoleInfo("rollout", "rollout-0", "w1")
LEASE_S = 10.0


def record(version: int, step: int | None = None, parent: int | None = None) -> VersionRecord:
    if parent is None and version > 0:
        parent = version - 1
    return VersionRecord(version, 1, version if step is None else step, parent, "live", "d")


class World:
    """A buffer, and the others as recorders."""

    def __init__(
        self,
        *,
        versions: int = 1,
        num_prompts: int = 100,
        prompts: Sequence[Prompt] | None = None,
        directory: Path | None = None,
        **sections: Any,
    ) -> None:
        buffer = {"batch_groups": 2, "lease_s": LEASE_S, "max_staleness": 1}
        sections["buffer"] = buffer | sections.get("buffer", {})
        sections["rollout"] = {"max_tokens": 5, "group_size": 2, "group_timeout_s": LEASE_S}
        self.config = small_config(**sections)
        self.others = RecordedDirectory()
        self.records = [record(v) for v in range(versions)]
        registry = self.others.ref("registry")
        registry.answer = self._registry
        self.system = make_system(remote=self.others)
        self.ledger = GroupLedger.open(None if directory is None else directory / "ledger.sqlite")
        self.ref = BufferActor.start(
            self.system,
            RoleInfo("buffer", "buffer", "b1"),
            config=self.config,
            prompts=prompts or [Prompt(f"p{i}", f"{i}>") for i in range(num_prompts)],
            ledger=self.ledger,
            payloads=None if directory is None else Payloads(directory / "payloads"),
        )

    def _registry(self, message: Message) -> Message:
        if isinstance(message, RegisterRole):
            return RoleRegistered((), tuple(self.records))
        assert isinstance(message, DescribeLineage)
        known = {r.version: r for r in self.records}
        return LineageDescribed(tuple(known[v] for v in message.versions if v in known))

    @property
    def worker(self) -> RecordedRef:
        return self.others.ref("rollout-0")

    @property
    def trainer(self) -> RecordedRef:
        return self.others.ref("trainer-0")

    async def tell(self, *messages: Message) -> None:
        for message in messages:
            self.ref.tell(message)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def claim(self, credit: int, version: int = 0) -> list[Assignment]:
        seen = len(self.assignments)
        await self.tell(ClaimPrompts("rollout-0", "w1", credit, version, "b1"))
        return self.assignments[seen:]

    @property
    def assignments(self) -> list[Assignment]:
        return [a for m in self.worker.of(PromptsClaimed) for a in m.assignments]

    @property
    def batches(self) -> list[BatchReady]:
        return self.trainer.of(BatchReady)

    async def finish(self, assignment: Assignment, version: int = 0, **kwargs: Any) -> None:
        await self.tell(finished(assignment, version, **kwargs))

    async def request(self, version: int = 0, step: int | None = None, term: int = 1) -> None:
        step = version if step is None else step
        await self.tell(RequestBatch("trainer-0", term, version, step, None, "b1"))


def finished(
    assignment: Assignment,
    version: int,
    rewards: tuple[float, ...] = (0.0, 1.0),
    rollouts: tuple[Rollout, ...] | None = None,
) -> GroupFinished:
    def rollout(reward: float) -> Rollout:
        return Rollout(
            Packed.of([3], "int32"),
            Packed.of([4, 1], "int32"),
            Packed.of([-1.0, -1.0], "float32"),
            Packed.of([1, 1], "uint8"),
            (VersionSpan(version, 0, 2),),
            "stop",
            reward,
            0,
        )

    group = RolloutGroup(
        assignment.group_id,
        assignment.attempt,
        assignment.prompt.prompt_id,
        assignment.epoch,
        tuple(rollout(reward) for reward in rewards) if rollouts is None else rollouts,
    )
    return GroupFinished("rollout-0", "w1", group, RolloutStats("rollout-0", "w1"))


def failed(assignment: Assignment, reason: str = "reward") -> GroupFailed:
    stats = RolloutStats("rollout-0", "w1")
    return GroupFailed(
        "rollout-0", "w1", assignment.group_id, assignment.attempt, reason, "why", stats
    )


def scenario(body: Callable[[World], Awaitable[None]], **kwargs: Any) -> None:
    async def main() -> None:
        world = World(**kwargs)
        await world.settle()
        await body(world)
        assert world.ref.is_alive(), world.system.log.events
        await world.ref.stop(block=False)

    run_virtual(main())


def ids(ready: BatchReady) -> list[int]:
    return [group.group_id for group in ready.batch.groups]
