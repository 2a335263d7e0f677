"""A trainer whose registry, engines, buffer and sender answer by script, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from tests.helpers.actors import RecordingLog, make_system
from tests.helpers.config import small_config
from tests.helpers.refs import RecordedDirectory, RecordedRef
from tests.helpers.training import make_groups
from tests.simulation.loop import run_virtual

from ratchet.actors.trainer import TrainerActor
from ratchet.backends.training.base import GradientReport, StepReport
from ratchet.backends.training.fake import FakeBackend
from ratchet.errors import StaleTerm, TransferFailed
from ratchet.messages import (
    AcquireTerm,
    BatchReady,
    BurnVersion,
    CommitVersion,
    EvaluatePolicy,
    LoadWeights,
    Message,
    PolicyEvaluated,
    RegisterRole,
    RequestBatch,
    ReserveVersion,
    RoleRegistered,
    StepTrained,
    TermAcquired,
    VersionBurnt,
    VersionCommitted,
    VersionReserved,
    WeightsLoaded,
)
from ratchet.runtime.role import EndOfActor
from ratchet.stats import BufferStats
from ratchet.transport.weights.base import SendReport
from ratchet.types import (
    Batch,
    Prompt,
    RoleInfo,
    RolloutGroup,
    VersionRecord,
    WeightManifest,
    WeightRoute,
)

BUFFER = RoleInfo("buffer", "buffer", "b1")
ROLE = RoleInfo("trainer", "trainer-0", "t1")
E0 = RoleInfo("rollout", "rollout-0", "a")
E1 = RoleInfo("rollout", "rollout-1", "b")
BATCH_TIMEOUT_S = 100.0
SEND_S = 5.0
FORWARD_S = 2.0
OPTIMIZER_S = 1.0


class Backend(FakeBackend):
    """Notes when each half of a step begins."""

    def __init__(self, note: Callable[..., None], **script: Any) -> None:
        super().__init__(forward_backward_s=FORWARD_S, optimizer_s=OPTIMIZER_S, **script)
        self._note = note
        self.trained: list[list[list[int]]] = []
        """of each call, group and rollout, whether a token is trained"""

    async def warm_start(self, prompts: Sequence[Prompt]) -> Mapping[str, float]:
        self._note("warm_start", len(prompts))
        return await super().warm_start(prompts)

    async def forward_backward(self, groups: Sequence[RolloutGroup]) -> GradientReport:
        self._note("forward", *(group.group_id for group in groups))
        self.trained.append(
            [[int(r.num_trained_tokens > 0) for r in group.rollouts] for group in groups]
        )
        return await super().forward_backward(groups)

    async def optimizer_step(self) -> StepReport:
        self._note("optimizer")
        return await super().optimizer_step()

    async def skip_step(self) -> None:
        self._note("skip")
        await super().skip_step()


class World:
    """A trainer; the others answer by script. `events` are (seconds, what, ...)."""

    def __init__(
        self,
        *,
        script: Mapping[str, Any] | None = None,
        snapshot: Any = None,
        rollouts: tuple[RoleInfo, ...] = (E0,),
        batch_filter: Any = None,
        **sections: Any,
    ) -> None:
        trainer = {"num_steps": 2, "batch_timeout_s": BATCH_TIMEOUT_S}
        sections["trainer"] = trainer | sections.get("trainer", {})
        self.config = small_config(**sections)
        self.events: list[tuple[Any, ...]] = []
        self.log = RecordingLog()
        self.others = RecordedDirectory()
        self.registry = self.others.ref("registry")
        self.registry.answer = self._registry
        self.snapshot = snapshot
        self.rollouts = rollouts
        self.engines: dict[str, Callable[[int], WeightsLoaded]] = {}
        for name in ("rollout-0", "rollout-1"):
            self.others.ref(name).answer = self._engine(name)
        self.records: list[VersionRecord] = []
        self.fenced = False
        self.lines: list[dict[str, Any]] = []
        self.summaries: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.models = 0
        self.backend = Backend(self.note, **(script or {}))
        self.ref = TrainerActor.start(
            make_system(remote=self.others, log=self.log),
            ROLE,
            config=self.config,
            backend=self.backend,
            sender=self,
            output=self,
            warm_start_prompts=[Prompt("w", "1>", reference="1")],
            snapshot=snapshot,
            batch_filter=batch_filter,
        )

    def note(self, what: str, *details: Any) -> None:
        self.events.append((round(asyncio.get_running_loop().time(), 6), what, *details))

    def of(self, what: str) -> list[tuple[Any, ...]]:
        return [(event[0], *event[2:]) for event in self.events if event[1] == what]

    def order(self, *what: str) -> list[str]:
        return [event[1] for event in self.events if event[1] in what]

    # the registry and the engines

    def _registry(self, message: Message) -> Message:
        match message:
            case RegisterRole():
                return RoleRegistered((ROLE, BUFFER, *self.rollouts), ())
            case AcquireTerm():
                return TermAcquired(1, tuple(self.records))
            case _ if self.fenced:
                raise StaleTerm("term 1 is fenced by term 2: another trainer has taken over")
            case ReserveVersion():
                version = len(self.records)
                self.records.append(
                    VersionRecord(version, 1, message.step, message.parent, "reserved")
                )
                self.note("reserve", version)
                return VersionReserved(version, self.rollouts)
            case CommitVersion():
                self.note("commit", message.version)
                return VersionCommitted(message.version)
            case BurnVersion():
                self.note("burn", message.version)
                return VersionBurnt(message.version)
        raise AssertionError(message)

    def _engine(self, name: str) -> Callable[[Any], Message]:
        def answer(message: Any) -> Message:
            if isinstance(message, EvaluatePolicy):
                return PolicyEvaluated(message.version, (0.5,) * message.count)
            assert isinstance(message, LoadWeights)
            version = message.manifest.version
            self.note("load", name, version)
            if name in self.engines:
                return self.engines[name](version)
            return WeightsLoaded(name, version, f"digest-{version}", 0, 0, 0)

        return answer

    # the sender

    def plan(
        self, term: int, version: int, step: int, engines: Sequence[str], *, catch_up: bool = False
    ) -> tuple[WeightManifest, Mapping[str, WeightRoute]]:
        routes = {e: WeightRoute("t", "b", "", 0, e, r, 2, 1.0) for r, e in enumerate(engines, 1)}
        return WeightManifest(term, version, step, (), (), {}), routes

    async def send(self, manifest: WeightManifest) -> SendReport:
        before = self.backend.weights
        self.note("send", manifest.version)
        await asyncio.sleep(SEND_S)
        self.note("sent", manifest.version)
        if self.snapshot is None:
            assert (self.backend.weights == before).all(), "the weights changed under a transfer"
        return SendReport(f"digest-{manifest.version}", 8, 1, 0.0, SEND_S)

    def leave(self, engine: str, reason: str) -> None:
        self.note("leave", engine)

    async def close(self) -> None:
        self.note("closed")

    # the output

    def begin(self, step: int) -> None:
        self.began_at = step

    def step(self, metrics: Mapping[str, Any]) -> None:
        self.lines.append(dict(metrics))

    def evaluation(self, evaluation: Mapping[str, Any]) -> None:
        self.evaluations.append(dict(evaluation))

    def summary(self, summary: Mapping[str, Any]) -> None:
        self.summaries.append(dict(summary))

    async def model(self, backend: Any) -> None:
        assert backend is self.backend
        self.models += 1

    # the buffer

    @property
    def buffer(self) -> RecordedRef:
        return self.others.ref("buffer")

    @property
    def requests(self) -> list[tuple[int, int]]:
        assert all(r.trainer == ROLE.name and r.term == 1 for r in self.buffer.of(RequestBatch))
        return [(request.version, request.step) for request in self.buffer.of(RequestBatch)]

    async def until_request(self, number: int) -> None:
        """Until the trainer has asked for the `number`th batch, from 1."""
        while len(self.requests) < number:
            assert self.ref.is_alive(), self.log.events
            await asyncio.sleep(0.5)  # of virtual time

    async def answer(self, number: int, *versions: int) -> None:
        """Await the `number`th request and answer it with one group of each version."""
        await self.until_request(number)
        self.ref.tell(self.batch(self.requests[-1][1] + 1, *versions, first=10 * number))

    def batch(self, step: int, *versions: int, first: int = 0, term: int = 1) -> BatchReady:
        groups = tuple(
            group_of(group, version, first + i)
            for i, (group, version) in enumerate(
                zip(make_groups(len(versions), 2), versions, strict=True)
            )
        )
        stats = BufferStats(staleness=(0,) * len(versions))
        return BatchReady(term, Batch(step, groups), stats, BUFFER.incarnation)

    async def end(self, within_s: float = 1000.0) -> None:
        end = EndOfActor("test")
        self.ref.watch(end)
        async with asyncio.timeout(within_s):
            await end.reason

    async def tell(self, *messages: Message) -> None:
        for message in messages:
            self.ref.tell(message)
        for _ in range(20):
            await asyncio.sleep(0)


def account(step: int, trained: tuple[int, ...], rejected: dict[int, str]) -> StepTrained:
    """Of term 1, and of groups at their first attempt."""
    return StepTrained(1, step, trained, rejected, dict.fromkeys((*trained, *rejected), 0))


def group_of(group: RolloutGroup, version: int, group_id: int) -> RolloutGroup:
    return mixed_group(group, (version,) * len(group.rollouts), group_id)


def mixed_group(group: RolloutGroup, versions: Sequence[int], group_id: int) -> RolloutGroup:
    """Return the group with a version for each of its rollouts."""
    rollouts = tuple(
        msgspec.structs.replace(
            r, spans=tuple(msgspec.structs.replace(s, version=version) for s in r.spans)
        )
        for r, version in zip(group.rollouts, versions, strict=True)
    )
    return msgspec.structs.replace(group, group_id=group_id, rollouts=rollouts)


def scenario(body: Callable[[World], Awaitable[None]], **kwargs: Any) -> None:
    async def main() -> None:
        world = World(**kwargs)
        await body(world)
        await world.ref.stop(block=False)

    run_virtual(main())


def fails(version: int) -> WeightsLoaded:
    raise TransferFailed(f"no room for version {version}")
