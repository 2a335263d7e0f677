"""The rollout actor: groups that finish or fail, an engine that is lost, and its facts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from tests.helpers.refs import RecordedRef
from tests.helpers.rollout_world import ROLE, SLOTS, TIMEOUT_S, TOKENS, World, scenario
from tests.simulation.loop import run_virtual

from ratchet.backends.rollout.base import SamplingParams
from ratchet.errors import GenerationFailed, RewardFailed
from ratchet.messages import Down


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
