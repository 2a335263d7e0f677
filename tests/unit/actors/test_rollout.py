from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tests.helpers.actors import RecordingLog, make_system
from tests.helpers.config import small_config
from tests.helpers.refs import RecordedDirectory, RecordedRef
from tests.helpers.scoring import SingleTurn
from tests.simulation.loop import run_virtual
from tests.simulation.weights import FakeReceiver, Passage, Wire, digest_of

from ratchet.actors.rollout import RolloutActor
from ratchet.backends.rollout.base import SamplingParams
from ratchet.backends.rollout.fake import FakeEngine
from ratchet.errors import (
    ActorDead,
    GenerationFailed,
    RewardFailed,
    StaleTerm,
    TransferFailed,
    VersionError,
    WeightsMismatch,
)
from ratchet.messages import (
    AbortLoad,
    ClaimPrompts,
    Down,
    EvaluatePolicy,
    GroupFailed,
    GroupFinished,
    LoadWeights,
    Message,
    PolicyEvaluated,
    PromptsClaimed,
    RegisterRole,
    RoleJoined,
    RoleRegistered,
    WeightsLoaded,
)
from ratchet.types import Assignment, Prompt, RoleInfo, WeightManifest, WeightRoute

BUFFER = RoleInfo("buffer", "buffer", "b1")
ROLE = RoleInfo("rollout", "rollout-0", "life-1")
SLOTS = 3
TIMEOUT_S = 10.0
TOKENS = 4


class Scorer(SingleTurn):
    """One reward after another; an exception is raised."""

    def __init__(self, *outcomes: list[float] | Exception) -> None:
        self.outcomes = list(outcomes)

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        outcome = self.outcomes.pop(0) if self.outcomes else [0.5] * len(completions)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self) -> None:
        pass


class World:
    """A rollout actor on a fake engine; registry and buffer are recorders."""

    def __init__(self, *outcomes: Any, role: RoleInfo = ROLE, **engine: Any) -> None:
        self.config = small_config(
            rollout={
                "max_tokens": TOKENS,
                "group_size": 2,
                "group_timeout_s": TIMEOUT_S,
                "max_concurrent_groups": SLOTS,
            }
        )
        self.log = RecordingLog()
        self.others = RecordedDirectory()
        self.others.ref("registry").answer = lambda _: RoleRegistered((BUFFER,), ())
        self.system = make_system(remote=self.others, log=self.log)
        self.wire = Wire()
        self.engine = FakeEngine(**engine)
        self.ref = RolloutActor.start(
            self.system,
            role,
            config=self.config,
            engine=self.engine,
            receiver=FakeReceiver(self.wire),
            scorer=Scorer(*outcomes),
            eval_prompts=[Prompt(f"e{i}", f"held out {i}") for i in range(3)],
        )

    @property
    def buffer(self) -> RecordedRef:
        return self.others.ref("buffer")

    @property
    def credit(self) -> list[int]:
        claims = self.buffer.of(ClaimPrompts)
        assert all((c.worker, c.incarnation) == (ROLE.name, ROLE.incarnation) for c in claims)
        return [claim.credit for claim in claims]

    async def tell(self, *messages: Message) -> None:
        for message in messages:
            self.ref.tell(message)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(40):
            await asyncio.sleep(0)

    def offer(
        self, version: int, term: int = 1, *, to: str = ROLE.incarnation
    ) -> asyncio.Future[WeightsLoaded]:
        """Ask it to load; `arrive` ends the transfer."""
        group = f"group-{version}-{term}"
        loop = asyncio.get_running_loop()
        passage = Passage(ROLE.name, loop.create_future(), loop.create_future())
        self.wire.passages[group] = passage
        manifest = WeightManifest(term, version, version, (), (), {})
        route = WeightRoute("fake", "none", "", 0, group, 1, 2, 60)
        return asyncio.ensure_future(
            self.ref.ask(LoadWeights(to, manifest, route), block=False, timeout=60)
        )

    def arrive(self, version: int, term: int = 1, *, size: int = 4) -> None:
        weights = np.full(size, version, np.float32)
        passage = self.wire.passages[f"group-{version}-{term}"]
        passage.arrival.set_result((weights, digest_of(weights)))

    async def load(self, version: int, term: int = 1) -> WeightsLoaded:
        reply = self.offer(version, term)
        self.arrive(version, term)
        return await reply

    async def assign(self, *group_ids: int, text: str = "12>", attempt: int = 0) -> None:
        assignments = tuple(
            Assignment(group_id, attempt, 0, Prompt(f"p{group_id}", text), 2, 30.0)
            for group_id in group_ids
        )
        await self.tell(PromptsClaimed(ROLE.incarnation, assignments, BUFFER.incarnation))

    @property
    def finished(self) -> list[GroupFinished]:
        return self.buffer.of(GroupFinished)

    @property
    def failed(self) -> list[GroupFailed]:
        return self.buffer.of(GroupFailed)


def scenario(
    body: Callable[[World], Awaitable[None]], *outcomes: Any, load: bool = True, **engine: Any
) -> None:
    async def main() -> None:
        world = World(*outcomes, **engine)
        await world.settle()
        if load:
            await world.load(0)
            await world.settle()
        await body(world)
        assert world.ref.is_alive(), world.log.events
        await world.ref.stop(block=False)

    run_virtual(main())


# --- credit


def test_no_credit_before_the_first_load() -> None:
    async def body(world: World) -> None:
        (registered,) = world.others.ref("registry").of(RegisterRole)
        assert registered.role == ROLE
        await world.tell(RoleJoined(RoleInfo("buffer", "buffer", "b1")))
        reply = world.offer(0)
        await world.settle()
        assert world.credit == []
        world.arrive(0)
        loaded = await reply
        await world.settle()
        assert world.credit == [SLOTS]
        assert loaded.digest == digest_of(np.zeros(4, np.float32))
        assert (loaded.worker, loaded.version) == (ROLE.name, 0)

    scenario(body, load=False)


def test_credit_is_slots_and_ended_groups_for_better_or_worse() -> None:
    async def body(world: World) -> None:
        await world.assign(0)
        await world.assign(1)
        assert (len(world.finished), len(world.failed)) == (1, 1)
        assert world.credit == [SLOTS, SLOTS + 1, SLOTS + 2]
        await world.load(1)
        await world.settle()
        assert set(world.credit) == {SLOTS, SLOTS + 1, SLOTS + 2}  # a load gives no room

    scenario(body, [0.5, 0.5], RewardFailed("no"))


def test_a_new_life_of_the_buffer_is_told_the_credit_again() -> None:
    async def body(world: World) -> None:
        await world.tell(RoleJoined(RoleInfo("rollout", "rollout-1", "x")))
        assert world.credit == [SLOTS]
        await world.tell(RoleJoined(RoleInfo("buffer", "buffer", "b2")))
        assert world.credit == [SLOTS, SLOTS]
        # its own link is later than the news of it: what was said meanwhile went to the old life
        assert world.others.ref("buffer").watchers
        await world.tell(Down("buffer", "buffer has restarted"))
        assert world.credit == [SLOTS, SLOTS, SLOTS]

    scenario(body)


def test_an_engine_without_weights_takes_no_more_work() -> None:
    async def body(world: World) -> None:
        await world.assign(0)  # in flight when the engine loses its weights
        await world.engine.write({"w": np.ones(4, np.float32)})
        await asyncio.sleep(TIMEOUT_S + 1)
        assert [f.reason for f in world.failed] == ["timeout"]
        assert world.credit == [SLOTS]
        await world.load(1)
        await world.settle()
        assert world.credit == [SLOTS, SLOTS + 1]

    scenario(body, delay_s=lambda *_: 1.0)


def test_claims_for_another_life_are_ignored() -> None:
    async def body(world: World) -> None:
        assignment = Assignment(0, 0, 0, Prompt("p", "1>"), 2, 30.0)
        await world.tell(PromptsClaimed("life-0", (assignment,), BUFFER.incarnation))
        await asyncio.sleep(TIMEOUT_S)
        assert world.log.named("claim_of_another_life")[0]["meant_for"] == "life-0"
        assert world.finished == world.failed == []
        assert world.credit == [SLOTS]

    scenario(body)


def test_weights_for_another_life_are_refused() -> None:
    # the trainer would take the older life's word for the newer one's, and never offer it a version
    async def body(world: World) -> None:
        with pytest.raises(VersionError, match="meant for its life life-2"):
            await world.offer(1, to="life-2")
        assert (await world.load(1)).version == 1

    scenario(body)


# --- groups


def test_a_finished_group_is_whole_and_in_its_own_words() -> None:
    async def body(world: World) -> None:
        await world.assign(7, attempt=2)
        (finished,) = world.finished
        group = finished.group
        assert (group.group_id, group.attempt, group.prompt_id, group.epoch) == (7, 2, "p7", 0)
        assert group.rewards == (0.25, 1.0)
        for rollout in group.rollouts:
            assert rollout.prompt_ids.numpy().tolist() == list(b"12>")
            assert len(rollout.completion_ids) == len(rollout.behavior_logprobs) == TOKENS
            assert rollout.loss_mask.numpy().tolist() == [1] * TOKENS
            assert [tuple(s) for s in map(_span, rollout.spans)] == [(0, 0, TOKENS)]
        first, second = group.rollouts
        assert first.seed != second.seed
        assert first.completion_ids != second.completion_ids

    scenario(body, [0.25, 1.0])


def _span(span: Any) -> tuple[int, int, int]:
    return span.version, span.start, span.end


def refuse(*_: Any) -> float:
    raise GenerationFailed("the device is gone")


@pytest.mark.parametrize(
    ("outcome", "reason", "words", "engine"),
    [
        (None, "generation", "the device is gone", {"delay_s": refuse}),
        (None, "prompt", "context of 6", {"context": 6}),
        (None, "timeout", f"{TIMEOUT_S}", {"delay_s": lambda *_: TIMEOUT_S * 2}),
        (RewardFailed("cannot judge"), "reward", "cannot judge", {}),
        ([0.0, float("nan")], "reward", "nan", {}),
        ([float("inf"), 1.0], "reward", "inf", {}),
        ([1.0], "reward", "for 2 completions", {}),
    ],
)
def test_each_failure_has_its_reason_and_is_no_reward(
    outcome: Any, reason: str, words: str, engine: dict[str, Any]
) -> None:
    async def body(world: World) -> None:
        await world.assign(3, attempt=1)
        await asyncio.sleep(TIMEOUT_S + 0.1)
        (failed,) = world.failed
        assert (failed.group_id, failed.attempt, failed.reason) == (3, 1, reason)
        assert words in failed.detail
        assert world.finished == []
        assert (failed.stats.failed_groups, failed.stats.in_flight_groups) == (1, 0)
        assert world.engine.stats().running == world.engine.stats().waiting == 0

    scenario(body, *([outcome] if outcome is not None else []), **engine)


def test_one_failed_sample_takes_its_siblings_out_of_the_engine() -> None:
    calls = iter(range(100))

    def delay(prompt_ids: Sequence[int], params: SamplingParams) -> float:
        if next(calls) == 1:
            raise GenerationFailed("the second one")
        return 8.0

    async def body(world: World) -> None:
        await world.assign(0)
        assert [f.detail for f in world.failed] == ["the second one"]
        assert world.engine.stats().running == 0

    scenario(body, delay_s=delay)


def test_time_without_a_prompt_counts_only_while_there_is_room_for_one() -> None:
    async def body(world: World) -> None:
        await asyncio.sleep(3.0)  # and 0.1 in which it loaded and had no prompt either
        await world.assign(*range(SLOTS))
        await asyncio.sleep(4.5)
        assert world.finished[0].stats.starved_s == pytest.approx(3.1)
        await asyncio.sleep(10.0)
        await world.assign(90)
        await asyncio.sleep(4.5)
        assert world.finished[-1].stats.starved_s == pytest.approx(3.1 + 0.5 + 10.0 + 4.0)

    scenario(body)


def test_groups_run_side_by_side_and_the_stats_are_totals() -> None:
    async def body(world: World) -> None:
        started = asyncio.get_running_loop().time()
        await world.assign(0, 1, 2)
        await asyncio.sleep(4.5)
        assert sorted(f.group.group_id for f in world.finished) == [0, 1, 2]
        last = world.finished[-1].stats
        assert last.worker == ROLE.name
        assert last.incarnation == ROLE.incarnation
        assert last.version == 0
        assert last.generated_tokens == 3 * 2 * TOKENS
        assert (last.finished_groups, last.failed_groups, last.in_flight_groups) == (3, 0, 0)
        assert world.finished[0].stats.in_flight_groups == 2
        assert last.busy_s == pytest.approx(4.0)
        assert last.uptime_s == pytest.approx(started + 4.0)
        assert last.paused_s == pytest.approx(0.1)  # the load of version 0

    scenario(body, delay_s=lambda *_: 4.0)


def test_a_load_in_the_middle_is_seen_in_the_spans() -> None:
    async def body(world: World) -> None:
        await world.assign(0)
        await asyncio.sleep(2.5)
        await world.load(1)
        await asyncio.sleep(2)
        (finished,) = world.finished
        assert finished.group.versions == (0, 1)
        assert [_span(s) for s in finished.group.rollouts[0].spans] == [(0, 0, 2), (1, 2, 4)]

    scenario(body, delay_s=lambda *_: 4.0)


# --- weights


def test_an_older_term_is_refused_with_both_terms() -> None:
    async def body(world: World) -> None:
        await world.load(1, term=3)
        with pytest.raises(StaleTerm, match=r"rollout-0 refuses term 2.*seen term 3"):
            await world.load(2, term=2)
        assert world.engine.version == 1
        await world.load(2, term=3)
        assert world.engine.version == 2

    scenario(body)


def test_failures_in_a_row_make_it_rest_longer_and_longer_and_a_success_ends_that() -> None:
    """Every group fails at once, and the buffer has another one for each credit."""

    async def body(world: World) -> None:
        given = 0

        async def serve(until: float) -> None:
            nonlocal given
            while asyncio.get_running_loop().time() < until:
                await asyncio.sleep(0.01)
                while given < world.credit[-1]:
                    given += 1
                    await world.assign(given)

        await serve(60.0)
        failed = len(world.failed)
        assert 2 * SLOTS < failed < 20 * SLOTS
        await serve(160.0)
        # every ten seconds as many as there are slots
        assert 5 * SLOTS <= len(world.failed) - failed <= 11 * SLOTS

    scenario(body, delay_s=_bad_day)


def _bad_day(prompt_ids: Sequence[int], params: SamplingParams) -> float:
    raise GenerationFailed("a bad day")


def test_a_version_never_goes_back() -> None:
    async def body(world: World) -> None:
        await world.load(5)
        await world.load(5)  # the same again is no step back
        with pytest.raises(VersionError, match="version 5: it does not go back to 4"):
            await world.load(4)
        assert world.engine.version == 5

    scenario(body)


def test_a_version_does_not_go_back_after_a_failed_load_either() -> None:
    async def body(world: World) -> None:
        await world.load(5)
        reply = world.offer(6)
        world.arrive(6, size=9)  # another shape
        with pytest.raises(WeightsMismatch, match="came for"):
            await reply
        assert world.engine.version is None
        with pytest.raises(VersionError, match="does not go back to 5"):
            await world.load(5)
        await world.load(7)
        assert world.engine.version == 7

    scenario(body)


def test_a_failed_load_leaves_a_quarantine_and_the_next_one_ends_it() -> None:
    async def body(world: World) -> None:
        reply = world.offer(1)
        world.arrive(1, size=9)
        with pytest.raises(WeightsMismatch, match="came for"):
            await reply
        assert world.engine.version is None
        assert world.log.named("load_failed")[0]["version"] == 1
        await world.assign(0)
        await asyncio.sleep(5)
        assert world.finished == []  # it waits for weights
        await world.load(2)
        await asyncio.sleep(1)
        assert [f.group.versions for f in world.finished] == [(2,)]

    scenario(body)


def test_abort_ends_the_load_it_names_and_no_other() -> None:
    async def body(world: World) -> None:
        reply = world.offer(2)
        await world.settle()
        await world.tell(AbortLoad(0, 2, "a dead trainer's"), AbortLoad(1, 1, "an earlier one"))
        assert not reply.done()
        await world.tell(AbortLoad(1, 2, "lost: rollout-1"))
        with pytest.raises(TransferFailed, match="lost: rollout-1"):
            await reply
        assert world.engine.version == 0
        await world.tell(AbortLoad(1, 2, "again"))
        await world.load(3)
        assert world.engine.version == 3

    scenario(body)


def test_a_newer_load_supersedes_those_that_are_pending() -> None:
    async def body(world: World) -> None:
        first, second, third = (world.offer(version) for version in (1, 2, 3))
        await world.settle()
        world.arrive(3)
        assert (await third).version == 3
        for reply in (first, second):
            with pytest.raises(TransferFailed, match="superseded"):
                await reply
        assert not world.wire.passages["group-2-1"].joined.done()
        assert world.engine.version == 3

    scenario(body)


def test_a_load_takes_no_control_message_hostage_and_a_stop_ends_it() -> None:
    async def main() -> None:
        world = World()
        await world.settle()
        reply = world.offer(0)
        await world.settle()
        with pytest.raises(VersionError):
            await world.ref.ask(EvaluatePolicy(0, 0, 1, 1, 0.0), block=False, timeout=1)
        await world.ref.stop(block=False)
        with pytest.raises(ActorDead):
            await reply
        with pytest.raises(GenerationFailed, match="closed"):
            await world.engine.generate([1], SamplingParams(1, 1.0, 0))

    run_virtual(main())


# --- evaluation


def test_an_evaluation_has_one_mean_per_prompt_in_order() -> None:
    async def body(world: World) -> None:
        reply = await world.ref.ask(EvaluatePolicy(0, 1, 2, 2, 0.0), block=False, timeout=60)
        assert reply == PolicyEvaluated(0, (0.5, 0.25))
        await world.settle()
        assert world.credit == [SLOTS, SLOTS]  # it eats no quota
        assert set(world.buffer.told) == {
            ClaimPrompts(ROLE.name, ROLE.incarnation, SLOTS, 0, BUFFER.incarnation)
        }

    scenario(body, [0.0, 1.0], [0.5, 0.0])


def test_a_prompt_that_cannot_be_scored_is_none_not_zero() -> None:
    async def body(world: World) -> None:
        reply = await world.ref.ask(EvaluatePolicy(0, 0, 3, 1, 0.0), block=False, timeout=60)
        assert reply.rewards == (1.0, None, None)
        assert len(world.log.named("evaluation_failed")) == 2

    scenario(body, [1.0], RewardFailed("no"), [float("nan")])


def test_an_evaluation_is_of_the_version_that_was_asked_for() -> None:
    async def body(world: World) -> None:
        with pytest.raises(VersionError, match="holds version 0, not 4"):
            await world.ref.ask(EvaluatePolicy(4, 0, 1, 1, 0.0), block=False, timeout=60)
        asked = asyncio.ensure_future(
            world.ref.ask(EvaluatePolicy(0, 0, 1, 1, 0.0), block=False, timeout=60)
        )
        await asyncio.sleep(2.5)
        reply = world.offer(1)  # nothing keeps the engine from the weights that are sent to it
        with pytest.raises(VersionError, match="version 1 was sent while version 0 was evaluated"):
            await asked
        assert world.engine.stats().running == 0
        world.arrive(1)
        await reply

    scenario(body, delay_s=lambda *_: 4.0)


def test_new_prompts_wait_while_an_engine_evaluates_and_those_in_flight_go_on() -> None:
    async def body(world: World) -> None:
        await world.assign(0)
        asked = asyncio.ensure_future(
            world.ref.ask(EvaluatePolicy(0, 0, 1, 1, 0.0), block=False, timeout=60)
        )
        await asyncio.sleep(4.5)  # the group has ended, its prompts are longer
        assert len(world.finished) == 1
        assert world.credit == [SLOTS]
        await asked
        await world.settle()
        assert world.credit == [SLOTS, SLOTS + 1]

    scenario(body, delay_s=lambda prompt, _: 4.0 if len(prompt) < 8 else 6.0)


def test_an_engine_that_only_evaluates_claims_nothing() -> None:
    async def body(world: World) -> None:
        reply = await world.ref.ask(EvaluatePolicy(0, 0, 1, 1, 0.0), block=False, timeout=60)
        assert reply.rewards == (0.5,)
        await asyncio.sleep(1000)
        assert world.buffer.told == []

    scenario(body, role=RoleInfo("evaluator", "evaluator-0", ROLE.incarnation))


# --- what it says of itself


def test_its_facts_are_what_it_holds_and_what_it_loads() -> None:
    async def body(world: World) -> None:
        facts = world.system.facts("rollout-0")
        assert (facts["version"], facts["loading"], facts["finished_groups"]) == (None, None, 0)
        reply = world.offer(3)
        await world.settle()
        assert world.system.facts("rollout-0")["loading"] == 3
        world.arrive(3)
        await reply
        await world.assign(0)
        await world.assign(1)
        facts = world.system.facts("rollout-0")
        assert (facts["version"], facts["loading"]) == (3, None)
        assert (facts["finished_groups"], facts["failed_groups"]) == (1, 1)
        assert facts["in_flight_groups"] == 0
        assert 0.0 <= facts["busy_share"] <= 1.0

    scenario(body, [0.5, 0.5], RewardFailed("no"), load=False)


def test_a_worker_whose_groups_all_fail_claims_ever_more_slowly() -> None:
    async def body(world: World) -> None:
        for number in range(SLOTS):  # a few failures are no reason
            await world.assign(number)
            assert max(world.credit) == SLOTS + number + 1
        await world.assign(SLOTS)
        assert max(world.credit) == 2 * SLOTS
        await asyncio.sleep(0.2)
        assert max(world.credit) == 2 * SLOTS + 1
        for number in range(SLOTS + 1, 14):
            await world.assign(number)
            await asyncio.sleep(10.1)
        await world.assign(14)
        await asyncio.sleep(5.0)
        assert max(world.credit) == SLOTS + 14
        await asyncio.sleep(5.1)
        assert max(world.credit) == SLOTS + 15
        await world.assign(15)  # one success ends it
        assert max(world.credit) == SLOTS + 16

    scenario(body, *[RewardFailed("no")] * 15)


def test_a_worker_whose_engine_is_lost_fails_with_it() -> None:
    async def main() -> None:
        world = World(delay_s=lambda *_: 5.0)
        await world.settle()
        await world.load(0)
        await world.assign(0)
        watcher = RecordedRef("watcher")
        world.ref.watch(watcher)
        world.engine.lose("its server died of signal 9")
        await world.settle()
        assert not world.ref.is_alive()
        (end,) = watcher.of(Down)
        assert end.reason == "EngineLost: its server died of signal 9"
        assert world.finished == []

    run_virtual(main())
