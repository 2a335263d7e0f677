from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest
from tests.helpers.actors import RecordingLog, make_system
from tests.helpers.config import small_config
from tests.helpers.refs import RecordedDirectory, RecordedRef
from tests.helpers.training import make_groups
from tests.simulation.loop import run_virtual

from ratchet.actors.trainer import TrainerActor
from ratchet.backends.training.base import GradientReport, StepReport
from ratchet.backends.training.fake import FakeBackend
from ratchet.errors import AskTimeout, StaleTerm, TransferFailed
from ratchet.messages import (
    AcquireTerm,
    BatchReady,
    BurnVersion,
    CommitVersion,
    Down,
    EvaluatePolicy,
    LoadWeights,
    Message,
    PolicyEvaluated,
    RegisterRole,
    RequestBatch,
    ReserveVersion,
    RoleJoined,
    RoleLeft,
    RoleRegistered,
    StepTrained,
    StopTraining,
    TermAcquired,
    VersionBurnt,
    VersionCommitted,
    VersionReserved,
    VersionUpdated,
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
        _replaced(r, spans=tuple(_replaced(s, version=version) for s in r.spans))
        for r, version in zip(group.rollouts, versions, strict=True)
    )
    return _replaced(group, group_id=group_id, rollouts=rollouts)


def _replaced(value: Any, **fields: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(value, **fields)


def scenario(body: Callable[[World], Awaitable[None]], **kwargs: Any) -> None:
    async def main() -> None:
        world = World(**kwargs)
        await body(world)
        await world.ref.stop(block=False)

    run_virtual(main())


def fails(version: int) -> WeightsLoaded:
    raise TransferFailed(f"no room for version {version}")


# --- a whole run


def test_a_run_from_the_base_model_to_the_last_version() -> None:
    async def body(world: World) -> None:
        await world.answer(1, 0, 0)
        await world.answer(2, 0, 1)
        await world.end()
        assert world.requests == [(0, 0), (1, 1)]
        assert [e[1:] for e in world.of("commit")] == [(0,), (1,), (2,)]
        assert [r.parent for r in world.records] == [None, 0, 1]
        assert [r.step for r in world.records] == [0, 1, 2]
        trained = world.buffer.of(StepTrained)
        assert trained == [account(1, (10, 11), {}), account(2, (20, 21), {})]
        assert [(line["step"], line["version"]) for line in world.lines] == [(1, 0), (2, 1)]
        assert world.models == 1
        assert world.summaries == [
            {
                "status": "finished",
                "reason": None,
                "steps": 2,
                "eval_before": {
                    "version": 0, "accuracy": 0.5, "num_prompts": 3, "num_failed": 0,
                },
                "eval_after": {
                    "version": 2, "accuracy": 0.5, "num_prompts": 3, "num_failed": 0,
                },
            }
        ]  # fmt: skip
        assert world.order("closed") == ["closed"]

    scenario(body, eval={"num_prompts": 3})


def test_warm_start_comes_before_version_0() -> None:
    async def body(world: World) -> None:
        await world.until_request(1)
        assert world.order("warm_start", "reserve", "send", "commit") == [
            "warm_start", "reserve", "send", "commit",
        ]  # fmt: skip

    scenario(body, warm_start={"steps": 1})


# --- order of events


def test_the_number_is_reserved_before_the_batch_is_asked_for() -> None:
    async def body(world: World) -> None:
        await world.answer(1, 0)
        await world.until_request(2)
        assert world.requests[1] == (1, 1)
        assert world.of("commit")[-1][1] == 0  # asked for while version 1 still travels
        assert world.of("reserve")[-1][1] == 1

    scenario(body)


def test_forward_overlaps_with_the_transfer_and_the_optimizer_waits_for_it() -> None:
    async def body(world: World) -> None:
        await world.answer(1, 0)
        await world.answer(2, 0)
        await world.end()
        (_, sent_at, _) = (when for when, _ in world.of("sent"))
        (_, send_at, _) = (when for when, _ in world.of("send"))
        (_, forward_at) = (event[0] for event in world.of("forward"))
        (_, optimizer_at) = (event[0] for event in world.of("optimizer"))
        assert send_at <= forward_at < forward_at + FORWARD_S < sent_at
        assert optimizer_at == sent_at
        assert world.order("send", "sent") == ["send", "sent"] * 3  # never two in flight

    scenario(body)


class Copies:
    """A snapshot that takes no time."""

    async def take(self, version: int) -> None:
        pass

    def reading(self, version: int) -> Any:
        return nullcontext()


def test_with_a_snapshot_the_optimizer_does_not_wait_for_the_transfer() -> None:
    async def body(world: World) -> None:
        await world.answer(1, 0)
        await world.answer(2, 0)
        await world.end()
        stepped_at = [event[0] for event in world.of("optimizer")]
        sent_at = [event[0] for event in world.of("sent")]
        assert stepped_at[1] < sent_at[1]
        assert world.order("send", "sent") == ["send", "sent"] * 3  # never two in flight
        assert [e[1:] for e in world.of("commit")] == [(0,), (1,), (2,)]
        assert world.summaries[0]["status"] == "finished"
        assert world.lines[1]["publish_s"] == 0.0

    scenario(body, snapshot=Copies())


def test_a_line_has_the_last_sync_and_who_caught_up() -> None:
    async def body(world: World) -> None:
        await world.until_request(1)
        await world.tell(RoleJoined(E1))
        await asyncio.sleep(SEND_S + 1)
        await world.answer(1, 0)
        await world.answer(2, 1)
        await world.end()
        first, second = world.lines
        sync = {name: value for name, value in first.items() if name.startswith("weights/")}
        assert sync == {
            "weights/version": 0,
            "weights/sent_bytes": 8,
            "weights/num_buckets": 1,
            "weights/snapshot_s": 0.0,
            "weights/gather_s": 0.0,
            "weights/move_s": SEND_S,
            "weights/load_s": 0,
            "weights/paused_s": 0,
            "weights/num_loaded": 1,
            "weights/num_failed": 0,
            "weights/num_caught_up": 1,
        }
        assert first["sync_s"] == SEND_S
        assert (second["weights/version"], second["weights/num_caught_up"]) == (1, 0)

    scenario(body)


def test_the_synchronous_baseline_trains_on_nothing_while_it_publishes() -> None:
    async def body(world: World) -> None:
        await world.answer(1, 0)
        await world.until_request(2)
        assert world.order("sent", "commit") == ["sent", "commit"] * 2
        assert world.of("commit")[-1][1] == 1

    scenario(body, trainer={"synchronous": True})


# --- staleness, batches


def test_stale_groups_are_sent_back_and_never_trained() -> None:
    async def body(world: World) -> None:
        for number in (1, 2):
            await world.answer(number, number - 1)
        await world.answer(3, 0, 2, 1)  # staleness 2, 0 and 1; the bound is 1
        await world.end()
        assert world.of("forward")[2][1:] == (31, 32)
        assert world.buffer.of(StepTrained)[2] == account(3, (31, 32), {30: "stale"})
        assert world.lines[2]["num_groups"] == 2

    scenario(body, trainer={"num_steps": 3}, buffer={"batch_groups": 4, "max_staleness": 1})


def test_a_batch_all_stale_takes_no_step_and_another_is_asked_for() -> None:
    async def body(world: World) -> None:
        await world.answer(1, 0)
        await world.answer(2, 0)
        await world.until_request(3)
        assert world.requests == [(0, 0), (1, 1), (1, 1)]
        assert world.buffer.of(StepTrained)[1] == account(2, (), {20: "stale"})
        assert len(world.lines) == len(world.of("forward")) == 1
        assert world.ref.is_alive()

    scenario(body, buffer={"batch_groups": 4, "max_staleness": 0})


async def answer_mixed(world: World, number: int, *groups: tuple[int, ...]) -> None:
    """Answer the `number`th request with groups that have a version per rollout."""
    await world.until_request(number)
    ready = world.batch(world.requests[-1][1] + 1, *(0 for _ in groups), first=10 * number)
    mixed = [
        mixed_group(group, versions, group.group_id)
        for group, versions in zip(ready.batch.groups, groups, strict=True)
    ]
    world.ref.tell(_replaced(ready, batch=Batch(ready.batch.step, tuple(mixed))))


def test_with_mask_what_is_stale_is_masked_by_the_weights_that_take_the_step() -> None:
    async def body(world: World) -> None:
        await world.answer(1, 0)
        await answer_mixed(world, 2, (0, 1), (0, 0), (1, 1))  # the bound is 0, the weights are 1
        await world.end()
        assert world.of("forward")[1][1:] == (20, 22)
        assert world.backend.trained[1] == [[0, 1], [1, 1]]
        assert world.buffer.of(StepTrained)[1] == account(2, (20, 22), {21: "stale"})
        line = world.lines[1]
        assert (line["num_groups"], line["buffer/staleness_max"]) == (2, 0)
        assert (line["buffer/masked_groups"], world.lines[0]["buffer/masked_groups"]) == (1, 0)
        assert line["buffer/masked_tokens"] > 0

    scenario(body, buffer={"batch_groups": 4, "max_staleness": 0, "unused": "mask"})


class Marks:
    """A batch filter by script: what `marks` of the calls so far says."""

    def __init__(self, marks: Callable[[int, Sequence[RolloutGroup]], Any]) -> None:
        self._marks = marks
        self.seen: list[list[int]] = []
        self.closed = 0

    async def marks(self, groups: Sequence[RolloutGroup]) -> Any:
        self.seen.append([group.group_id for group in groups])
        found = self._marks(len(self.seen), groups)
        return await found if isinstance(found, Awaitable) else found

    def close(self) -> None:
        self.closed += 1


def test_what_the_batch_filter_marks_is_not_trained_and_the_batch_keeps_its_shape() -> None:
    def half(call: int, groups: Sequence[RolloutGroup]) -> Any:
        return [[True, False]] + [[True, True]] * (len(groups) - 1)

    batch_filter = Marks(half)

    async def body(world: World) -> None:
        await world.answer(1, 0, 0)
        await world.answer(2, 0, 0, 1)  # the first two are stale, and are not shown
        await world.end()
        assert batch_filter.seen == [[10, 11], [22]]
        assert world.of("forward")[0][1:] == (10, 11)
        assert world.backend.trained == [[[0, 1], [0, 0]], [[0, 1]]]
        first, second = world.buffer.of(StepTrained)
        assert first == account(1, (10,), {11: "filter:batch"})
        assert second == account(2, (22,), {20: "stale", 21: "stale"})
        assert [line["buffer/marked_samples"] for line in world.lines] == [3, 1]
        assert [line["num_groups"] for line in world.lines] == [1, 1]
        assert batch_filter.closed == 1

    buffer = {"batch_groups": 4, "max_staleness": 0}
    scenario(body, batch_filter=batch_filter, buffer=buffer)


def test_a_batch_with_nothing_left_is_a_step_skipped_counted_and_not_published() -> None:
    def first_all(call: int, groups: Sequence[RolloutGroup]) -> Any:
        return [[call == 1] * 2 for _ in groups]

    async def body(world: World) -> None:
        await world.answer(1, 0)
        await world.answer(2, 0)
        await world.until_request(3)
        assert world.order("forward", "skip", "optimizer") == ["forward", "optimizer"]
        assert [e[1:] for e in world.of("reserve")] == [(0,), (1,)]
        assert world.requests == [(0, 0), (0, 0), (1, 1)]
        assert world.buffer.of(StepTrained)[0] == account(1, (), {10: "filter:batch"})
        line = world.lines[0]
        assert (line["applied"], line["num_groups"], line["reward_mean"]) == (False, 0, None)
        (event,) = world.log.named("step_skipped")
        assert (event["reason"], event["groups"]) == ("nothing_to_train", [10])

    scenario(body, batch_filter=Marks(first_all))


def test_a_batch_filter_that_leaves_nothing_ends_the_run_in_the_end() -> None:
    async def body(world: World) -> None:
        for number in (1, 2, 3):
            await world.answer(number, 0)
        await world.end()
        assert world.summaries[0]["reason"] == (
            "3 steps in a row had no token to train (buffer.batch_filter = 'my.code:f');"
            " last groups: [30]"
        )

    marks = Marks(lambda call, groups: [[True] * 2 for _ in groups])
    scenario(body, batch_filter=marks, buffer={"batch_groups": 4, "batch_filter": "my.code:f"})


def test_a_batch_filter_that_does_not_answer_ends_the_run() -> None:
    async def body(world: World) -> None:
        await world.answer(1, 0)
        await world.end(BATCH_TIMEOUT_S + 20)
        assert world.summaries[0]["reason"] == (
            "trainer-0 waited 100.0 s (trainer.batch_timeout_s) on buffer.batch_filter for the"
            " marks of step 1"
        )
        assert world.of("forward") == []

    never = Marks(lambda call, groups: asyncio.get_running_loop().create_future())
    scenario(body, batch_filter=never)


def test_a_batch_that_is_not_due_is_never_trained() -> None:
    """The buffer may answer a repeated request twice; the second answer comes a step too late."""

    async def body(world: World) -> None:
        await world.answer(1, 0)
        await world.until_request(2)
        await world.tell(world.batch(1, 0, first=10), world.batch(2, 0, first=70, term=0))
        await asyncio.sleep(FORWARD_S)
        assert [event[1:] for event in world.of("forward")] == [(10,)]
        assert [e["step"] for e in world.log.named("batch_not_due")] == [1, 2]
        await world.answer(2, 0)
        await world.end()
        assert [event[1:] for event in world.of("forward")] == [(10,), (20,)]

    scenario(body)


def test_a_new_life_of_the_buffer_is_asked_again() -> None:
    async def body(world: World) -> None:
        await world.until_request(1)
        await world.tell(RoleJoined(RoleInfo("buffer", "buffer", "b2")))
        assert world.requests == [(0, 0), (0, 0)]
        # its own link is later than the news of it: what was said meanwhile went to the old life
        assert world.buffer.watchers
        await world.tell(Down("buffer", "buffer has restarted"))
        assert world.requests == [(0, 0)] * 3

    scenario(body)


# --- not finite


@pytest.mark.parametrize(
    ("script", "second_half"), [({"bad_gradients": [1]}, "skip"), ({"bad_steps": [1]}, "optimizer")]
)
def test_a_step_that_is_not_finite_is_skipped_counted_and_not_published(
    script: Any, second_half: str
) -> None:
    async def body(world: World) -> None:
        await world.answer(1, 0)
        await world.until_request(2)
        assert world.order("forward", "skip", "optimizer") == ["forward", second_half]
        assert [e[1:] for e in world.of("reserve")] == [(0,)]
        assert world.buffer.of(StepTrained) == [account(1, (), {10: "non_finite"})]
        assert world.requests == [(0, 0), (0, 0)]
        (line,) = world.lines
        assert (line["step"], line["applied"]) == (1, False)
        assert world.log.named("step_skipped")[0]["groups"] == [10]

    scenario(body, script=script)


def test_bad_steps_in_a_row_end_the_run_and_one_good_step_forgives() -> None:
    async def body(world: World) -> None:
        for number in range(1, 6):
            await world.answer(number, 0)
        await world.end()
        (summary,) = world.summaries
        assert summary["status"] == "failed"
        assert summary["steps"] == 1
        assert summary["reason"] == "3 steps in a row were not finite; last groups: [50]"
        assert world.models == 0
        assert len(world.of("commit")) == 2  # version 0 and the good step's

    script = {"bad_gradients": [1, 3, 4, 5]}
    scenario(body, script=script, trainer={"num_steps": 9, "max_bad_steps": 3})


# --- engines that fail, come late, leave


def test_a_failed_engine_is_offered_the_version_every_second_until_it_takes_it() -> None:
    async def body(world: World) -> None:
        world.rollouts = (E0, E1)
        world.engines["rollout-1"] = fails
        await world.until_request(1)  # the other one is enough
        assert [e[1:] for e in world.of("commit")] == [(0,)]
        (failed_at, _) = world.of("commit")[0]
        await asyncio.sleep(1 + SEND_S + 0.5)  # it fails again
        del world.engines["rollout-1"]
        await asyncio.sleep(60)
        loads = [event for event in world.of("load") if event[1] == "rollout-1"]
        assert [event[0] - failed_at for event in loads[1:]] == [1.0, 1.0 + SEND_S + 1.0]
        assert {event[2] for event in loads} == {0}

    scenario(body)


def test_an_engine_that_left_is_not_offered_anything() -> None:
    async def body(world: World) -> None:
        world.rollouts = (E0, E1)
        world.engines["rollout-1"] = fails
        await world.until_request(1)
        await world.tell(RoleLeft(E1, "killed"))
        await asyncio.sleep(10)
        assert len([e for e in world.of("load") if e[1] == "rollout-1"]) == 1

    scenario(body)


def test_an_engine_that_joins_late_catches_up_and_disturbs_nobody() -> None:
    async def body(world: World) -> None:
        await world.until_request(1)
        await world.tell(RoleJoined(E1), VersionUpdated(VersionRecord(0, 1, 0, None, "live")))
        await asyncio.sleep(SEND_S + 1)
        assert [e[1:] for e in world.of("load")] == [("rollout-0", 0), ("rollout-1", 0)]
        assert len(world.of("commit")) == 1

    scenario(body)


def test_an_engine_that_a_new_registry_knew_before_the_trainer_is_not_forgotten() -> None:
    async def body(world: World) -> None:
        await world.until_request(1)
        again = RoleInfo("rollout", "rollout-0", "its next life")
        world.rollouts = (again, E1)
        await world.tell(Down("registry", "the process of registry has ended"))
        await asyncio.sleep(2 * SEND_S + 1)
        loads = [e[1:] for e in world.of("load")]
        assert loads == [("rollout-0", 0), ("rollout-0", 0), ("rollout-1", 0)]
        assert len(world.of("commit")) == 1

    scenario(body)


def test_an_engine_that_joins_while_a_number_is_reserved_is_not_forgotten() -> None:
    async def body(world: World) -> None:
        registry = world.registry.answer
        assert registry is not None

        def answer(message: Message) -> Message:
            reply = registry(message)
            if isinstance(message, ReserveVersion):  # after the number, before its transfer
                world.ref.tell(RoleJoined(E1))
            return reply

        world.registry.answer = answer
        await world.until_request(1)
        await asyncio.sleep(SEND_S + 1)
        assert [e[1:] for e in world.of("load")] == [("rollout-0", 0), ("rollout-1", 0)]

    scenario(body)


def test_burnt_weights_are_published_again_under_a_new_number() -> None:
    async def body(world: World) -> None:
        await world.answer(1, 0)
        world.engines["rollout-0"] = fails
        await world.until_request(2)
        await asyncio.sleep(SEND_S + 0.5)
        assert [e[1:] for e in world.of("burn")] == [(1,)]
        del world.engines["rollout-0"]
        await asyncio.sleep(SEND_S + 1)
        assert [(r.version, r.step, r.parent) for r in world.records] == [
            (0, 0, None), (1, 1, 0), (2, 1, 1),
        ]  # fmt: skip
        assert world.of("commit")[-1][1] == 2
        await world.answer(2, 2)
        await world.end()
        assert world.records[-1].step == 2
        assert world.summaries[0]["status"] == "finished"

    scenario(body)


def test_the_first_version_is_tried_until_an_engine_takes_it() -> None:
    async def body(world: World) -> None:
        world.engines["rollout-0"] = fails
        await asyncio.sleep(SEND_S * 2)
        assert len(world.of("burn")) >= 1
        assert world.requests == []
        del world.engines["rollout-0"]
        await world.until_request(1)
        live = world.of("commit")[0][1]
        assert world.requests == [(live, 0)]

    scenario(body)


def test_without_an_engine_no_number_is_burnt() -> None:
    async def body(world: World) -> None:
        world.engines["rollout-0"] = fails
        await asyncio.sleep(SEND_S + 0.5)
        world.rollouts = ()
        await world.tell(RoleLeft(E0, "killed"))
        await asyncio.sleep(2 * SEND_S)
        burnt = len(world.of("burn"))
        await asyncio.sleep(BATCH_TIMEOUT_S / 2)
        assert len(world.of("burn")) == burnt
        world.rollouts = (E1,)
        await world.tell(RoleJoined(E1))
        await world.until_request(1)
        assert len(world.of("burn")) == burnt

    scenario(body)


# --- the end


def test_a_newer_trainer_ends_this_one() -> None:
    async def body(world: World) -> None:
        await world.until_request(1)
        world.fenced = True
        await world.answer(1, 0)
        await world.end()
        assert world.summaries == []  # that is for the other one to write
        assert world.models == 0
        assert world.buffer.of(StepTrained) == []

    scenario(body)


def test_no_batch_in_time_ends_the_run_and_says_who_waited_on_whom() -> None:
    async def body(world: World) -> None:
        await world.until_request(1)
        (row,) = world.ref._system.waits.rows()
        assert (row.who, row.on, row.what) == ("trainer-0", "buffer", "the batch of step 1")
        assert row.until - row.since == BATCH_TIMEOUT_S
        await world.end()
        (summary,) = world.summaries
        assert summary == {
            "status": "failed",
            "reason": "trainer-0 waited 100.0 s (trainer.batch_timeout_s) on buffer for the batch"
            " of step 1",
            "steps": 0,
        }

    scenario(body)


def test_no_engine_in_time_ends_the_run() -> None:
    async def body(world: World) -> None:
        world.rollouts = ()
        await world.end(BATCH_TIMEOUT_S + 5)
        assert "on rollout for the first engine" in world.summaries[0]["reason"]

    scenario(body)


def test_no_engine_that_takes_the_weights_ends_the_run() -> None:
    async def body(world: World) -> None:
        world.engines["rollout-0"] = fails
        await world.end(BATCH_TIMEOUT_S + 5)
        (summary,) = world.summaries
        assert summary["status"] == "failed"
        assert "on rollout for an engine to hold the first version" in summary["reason"]

    scenario(body)


async def _at_the_first_engine(world: World) -> None:
    world.rollouts = ()
    await asyncio.sleep(1)


async def _at_the_first_version(world: World) -> None:
    world.engines["rollout-0"] = fails
    await asyncio.sleep(SEND_S + 0.5)


async def _at_a_batch(world: World) -> None:
    await world.until_request(1)


@pytest.mark.parametrize("reach", [_at_the_first_engine, _at_the_first_version, _at_a_batch])
def test_a_stop_ends_every_wait_and_the_model_is_written(
    reach: Callable[[World], Awaitable[None]],
) -> None:
    async def body(world: World) -> None:
        await reach(world)
        await world.tell(StopTraining("asked to stop"))
        await world.end(SEND_S * 2 + 2)
        (summary,) = world.summaries
        assert (summary["status"], summary["reason"]) == ("stopped", "asked to stop")
        assert summary["steps"] == 0
        assert world.models == 1

    scenario(body)


def test_a_stop_in_a_step_lets_it_finish_and_be_published() -> None:
    async def body(world: World) -> None:
        await world.answer(1, 0)
        await asyncio.sleep(FORWARD_S / 2)
        await world.tell(StopTraining("enough"))
        await world.end()
        (summary,) = world.summaries
        assert (summary["status"], summary["steps"]) == ("stopped", 1)
        assert [e[1:] for e in world.of("commit")] == [(0,), (1,)]
        assert len(world.requests) == 1

    scenario(body, trainer={"num_steps": 50})


# --- what it says of itself


def test_its_facts_are_the_step_in_hand_and_what_the_next_one_waits_for() -> None:
    async def body(world: World) -> None:
        actor = world.ref._status().__self__
        assert actor.status()["last_step_s"] is None
        await world.until_request(1)
        facts = actor.status()
        assert (facts["step"], facts["version"], facts["term"]) == (0, 0, 1)
        assert (facts["waits_for_batch"], facts["publishing"]) == (True, False)
        assert (facts["live"], facts["holders"], facts["engines"]) == (0, 1, 1)
        await world.answer(1, 0)
        await world.until_request(2)
        await asyncio.sleep(30.0)
        facts = actor.status()
        assert (facts["step"], facts["version"], facts["live"]) == (1, 1, 1)
        assert isinstance(facts["last_step_s"], float)
        assert 30.0 <= facts["last_step_s"] < 31.0

    scenario(body)


# --- evaluation beside training

BESIDE = {"num_prompts": 4, "every_steps": 1, "timeout_s": 60.0}
LONG = {"batch_timeout_s": 400.0}


class Held:
    """An engine's evaluation lasts until it is let go."""

    def __init__(self, world: World, name: str) -> None:
        self.asked: list[EvaluatePolicy] = []
        self.go = asyncio.Event()
        self._others = world._engine(name)
        world.others.ref(name).answer = self.answer

    def answer(self, message: Any) -> Any:
        if isinstance(message, EvaluatePolicy) and message.version:
            self.asked.append(message)
            return self._wait(message)
        return self._others(message)

    async def _wait(self, message: EvaluatePolicy) -> Message:
        try:
            await asyncio.wait_for(self.go.wait(), 65.0)
        except TimeoutError:
            raise AskTimeout("rollout-0 did not answer") from None
        return PolicyEvaluated(message.version, (0.25,) * message.count)


def loads(world: World, engine: str) -> list[int]:
    return [version for _, name, version in world.of("load") if name == engine]


def test_training_goes_on_beside_an_evaluation_and_its_engine_catches_up() -> None:
    async def body(world: World) -> None:
        held = Held(world, "rollout-0")
        await world.answer(1, 0)
        for number in (2, 3):
            await world.answer(number, number - 1)
        await world.until_request(4)
        await asyncio.sleep(20.0)
        assert held.asked == [EvaluatePolicy(1, 0, 4, 1, 0.0)]
        assert loads(world, "rollout-0") == [0, 1]  # pinned
        assert loads(world, "rollout-1") == [0, 1, 2, 3]
        assert world.of("burn") == []
        assert len(world.log.named("evaluation_skipped")) == 2
        held.go.set()
        await asyncio.sleep(20.0)
        assert loads(world, "rollout-0") == [0, 1, 3]
        line = world.evaluations[-1]
        assert line.pop("seconds") > 0
        assert line == {
            "version": 1, "step": 1, "accuracy": 0.25, "num_prompts": 4, "num_failed": 0,
            "num_engines": 1, "num_skipped": 2,
        }  # fmt: skip
        await world.answer(4, 3)
        await world.end()
        assert [e["version"] for e in world.evaluations] == [0, 1, 4]  # the last one is for the end
        assert world.summaries[0]["eval_after"]["version"] == 4

    scenario(body, rollouts=(E0, E1), trainer=LONG | {"num_steps": 4}, eval=BESIDE)


def test_the_only_engine_is_lent_and_no_version_is_lost_for_good() -> None:
    async def body(world: World) -> None:
        held = Held(world, "rollout-0")
        await world.answer(1, 0)
        await world.answer(2, 1)  # from what the buffer has
        await world.until_request(3)
        assert loads(world, "rollout-0") == [0, 1]
        await asyncio.sleep(20.0)
        assert [e[1:] for e in world.of("burn")] == [(2,)]  # nobody could take it
        held.go.set()
        await asyncio.sleep(20.0)
        assert loads(world, "rollout-0") == [0, 1, 3]  # the same weights, under the next number
        await world.answer(3, 3)
        await world.end()
        assert world.summaries[0]["status"] == "finished"

    scenario(body, trainer=LONG | {"num_steps": 3}, eval=BESIDE)


def test_the_end_of_training_waits_for_the_evaluation_and_burns_no_numbers_meanwhile() -> None:
    async def body(world: World) -> None:
        held = Held(world, "rollout-0")
        await world.answer(1, 0)
        await world.answer(2, 1)
        await asyncio.sleep(50.0)
        assert [e[1:] for e in world.of("burn")] == [(2,)]
        held.go.set()
        await world.end()
        assert [e["version"] for e in world.evaluations] == [0, 1, 3]
        assert world.summaries[0]["eval_after"]["version"] == 3

    scenario(body, trainer=LONG | {"num_steps": 2}, eval=BESIDE)


def test_an_engine_that_never_answers_costs_its_prompts_and_is_given_up_in_time() -> None:
    async def body(world: World) -> None:
        Held(world, "rollout-0")
        await world.answer(1, 0)
        await world.answer(2, 1)
        await world.until_request(3)
        await asyncio.sleep(80.0)
        line = world.evaluations[-1]
        assert (line["version"], line["accuracy"], line["num_failed"]) == (1, None, 4)
        assert loads(world, "rollout-0")[-1] == 2
        await world.answer(3, 2)
        await world.end()
        assert world.summaries[0]["status"] == "finished"

    scenario(body, rollouts=(E0, E1), trainer=LONG | {"num_steps": 3}, eval=BESIDE)


def test_the_synchronous_baseline_evaluates_between_two_steps() -> None:
    async def body(world: World) -> None:
        held = Held(world, "rollout-0")
        await world.answer(1, 0)
        await asyncio.sleep(50.0)
        assert len(world.requests) == 1
        held.go.set()
        await world.answer(2, 1)
        await world.end()
        assert loads(world, "rollout-0") == [0, 1, 2]

    scenario(body, trainer=LONG | {"num_steps": 2, "synchronous": True}, eval=BESIDE)


def test_a_batch_of_a_buffer_that_another_has_followed_is_not_taken() -> None:
    async def body(world: World) -> None:
        await world.until_request(1)
        late = world.batch(1, 0, first=10)
        following = RoleInfo("buffer", "buffer", "b2")
        world.ref.tell(RoleJoined(following))
        world.ref.tell(late)
        await asyncio.sleep(1)
        assert [request.buffer for request in world.buffer.of(RequestBatch)][-2:] == ["b1", "b2"]
        assert len(world.log.named("batch_not_due")) == 1
        assert world.buffer.of(StepTrained) == []
        world.ref.tell(msgspec.structs.replace(world.batch(1, 0, first=20), buffer="b2"))
        await world.until_request(3)
        assert world.buffer.of(StepTrained) == [account(1, (20,), {})]

    scenario(body)
