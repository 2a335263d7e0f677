"""How many prompts a rollout actor claims, and how it rests when its groups fail."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from tests.helpers.rollout_world import BUFFER, ROLE, SLOTS, TIMEOUT_S, World, scenario
from tests.simulation.weights import digest_of

from ratchet.backends.rollout.base import SamplingParams
from ratchet.errors import GenerationFailed, RewardFailed
from ratchet.messages import Down, PromptsClaimed, RegisterRole, RoleJoined
from ratchet.types import Assignment, Prompt, RoleInfo


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
