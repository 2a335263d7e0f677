"""What a rollout actor evaluates, of which version, and what its groups do meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from tests.helpers.rollout_world import BUFFER, ROLE, SLOTS, World, scenario

from ratchet.errors import RewardFailed, VersionError
from ratchet.messages import ClaimPrompts, EvaluatePolicy, PolicyEvaluated
from ratchet.types import RoleInfo


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
