"""Groups that failed, were aborted or filtered: dropped, tried again, or trained in part."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.buffer_world import World, failed, scenario
from tests.helpers.samples import sample, trained_tokens, user_code
from tests.simulation.loop import run_virtual

from ratchet.messages import StepTrained


def test_failures_are_dropped_or_retried_within_their_budget() -> None:
    async def drop(world: World) -> None:
        (a,) = await world.claim(1)
        await world.tell(failed(a))
        assert world.ledger.reasons() == {"reward": 1}

    async def retry(world: World) -> None:
        (a,) = await world.claim(1)
        await world.tell(failed(a))
        (again,) = await world.claim(2)
        assert (again.group_id, again.attempt, again.prompt) == (0, 1, a.prompt)
        await world.tell(failed(again))
        assert world.ledger.reasons() == {"reward": 1}
        (other,) = await world.claim(3)
        assert other.group_id == 1

    scenario(drop)
    scenario(retry, buffer={"unused": "retry", "max_retries": 1})


def test_a_group_without_spread_is_filtered_not_retried() -> None:
    async def body(world: World) -> None:
        a, b = await world.claim(2)
        await world.finish(a, rewards=(1.0, 1.0))
        await world.finish(b)
        assert world.ledger.reasons() == {"filter:zero_spread": 1}
        assert world.ledger.counts()["finished"] == 1

    scenario(body, buffer={"filters": ["zero_spread"], "unused": "retry"})


def test_what_the_batch_filter_rejects_is_not_retried_and_what_was_not_finite_is() -> None:
    async def body(world: World) -> None:
        for assignment in await world.claim(4):
            await world.finish(assignment)
        await world.request()
        await world.tell(StepTrained(1, 1, (), {0: "filter:batch", 1: "non_finite"}))
        assert world.ledger.reasons() == {"filter:batch": 1}
        (again,) = await world.claim(5)
        assert (again.group_id, again.attempt) == (1, 1)

    scenario(body, buffer={"unused": "retry", "capacity_factor": 1.5})


def test_of_an_aborted_group_the_whole_rollouts_are_trained_or_nothing() -> None:
    mixed = (sample(1.0), sample(0.5, finish="abort"))
    nothing = (sample(0.5, finish="abort", length=0), sample(0.5, finish="error"))

    async def mask(world: World) -> None:
        a, b, c = await world.claim(3)
        await world.finish(a, rollouts=mixed)
        await world.finish(b, rollouts=nothing)
        assert world.ledger.reasons() == {"aborted": 1}
        await world.finish(c)
        await world.request()
        (ready,) = world.batches
        assert [trained_tokens(group) for group in ready.batch.groups] == [[2, 0], [2, 2]]
        assert ready.stats.masked == {"aborted": 1}
        assert ready.stats.offered.rewards.histogram == {1.0: 2, 0.0: 1}
        row = world.ledger.group(0)
        assert row is not None
        assert (row.reward_mean, row.reason) == (1.0, "aborted")

    async def drop(world: World) -> None:
        for rollouts, assignment in zip([mixed, nothing], await world.claim(2), strict=True):
            await world.finish(assignment, rollouts=rollouts)
        assert world.ledger.reasons() == {"aborted": 2}

    scenario(mask, buffer={"unused": "mask"})
    scenario(drop)


def test_code_of_the_user_that_fails_ends_the_buffer_with_its_name(tmp_path: Path) -> None:
    async def main() -> None:
        name = user_code(tmp_path, "return x.nothing")
        world = World(buffer={"filters": [name]})
        await world.settle()
        (a,) = await world.claim(1)
        await world.finish(a)
        assert not world.ref.is_alive()
        (failure,) = world.system.log.named("actor_failed")
        assert name in failure["reason"]
        assert "nothing" in failure["reason"]

    run_virtual(main())
