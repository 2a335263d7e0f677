"""A trainer whose engines evaluate beside training."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.helpers.trainer_world import E0, E1, World, scenario

from ratchet.errors import AskTimeout
from ratchet.messages import EvaluatePolicy, Message, PolicyEvaluated

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
