"""What a rollout worker does for one group; the actor around it is proved in test_rollout.py."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.helpers.config import small_config
from tests.helpers.scoring import SingleTurn
from tests.simulation.loop import run_virtual

from ratchet.actors.generation import Generator, GroupFailure
from ratchet.actors.trajectory import sample_seed
from ratchet.backends.rollout.base import Completion, SamplingParams
from ratchet.backends.rollout.fake import NAME, FakeEngine, fake_token
from ratchet.errors import GenerationFailed, VersionError
from ratchet.messages import EvaluatePolicy
from ratchet.types import Assignment, Prompt, RolloutGroup

PROMPT = Prompt("p", "12>")


class Scorer(SingleTurn):
    def __init__(self) -> None:
        self.seen: list[tuple[Prompt, list[str]]] = []

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        self.seen.append((prompt, list(completions)))
        return [float(len(self.seen)), 0.5, 0.25, 0.0][: len(completions)]


def assignment(group_id: int = 0, attempt: int = 0, group_size: int = 2) -> Assignment:
    return Assignment(group_id, attempt, 1, PROMPT, group_size, 30.0)


async def make(
    seed: int = 0, version: int = 0, **engine: Any
) -> tuple[Generator, FakeEngine, Scorer]:
    fake = FakeEngine(**engine)
    await fake.start()
    await fake.write({NAME: np.full(4, version, np.float32)})
    await fake.stamp(version)
    scorer = Scorer()
    config = small_config(rollout={"max_tokens": 3, "temperature": 0.7})
    return Generator(config.model_copy(update={"seed": seed}), fake, scorer), fake, scorer


def test_seeds_differ_for_run_group_attempt_and_sample() -> None:
    places = list(itertools.product((0, 1), (0, 1, 12, 121), (0, 1, 11), range(8)))
    seeds = {sample_seed(*place) for place in places}
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(0, 1, 0, 0) == sample_seed(0, 1, 0, 0)
    assert sample_seed(1, 23, 4, 5) != sample_seed(12, 3, 4, 5)


def test_the_engine_gets_each_sample_of_a_group_with_a_seed_of_its_own() -> None:
    asked: list[SamplingParams] = []

    def note(prompt_ids: Sequence[int], params: SamplingParams) -> float:
        assert list(prompt_ids) == list(b"12>")
        asked.append(params)
        return 0.0

    async def main() -> None:
        generator, _, _ = await make(seed=5, delay_s=note)
        for place in ((0, 0), (0, 1), (1, 0)):
            await generator.run_group(assignment(*place, group_size=4))
        assert len({params.seed for params in asked}) == 12
        assert asked[4].seed == sample_seed(5, 0, 1, 0)
        assert {(p.max_tokens, p.temperature) for p in asked} == {(3, 0.7)}

    run_virtual(main())


def test_the_same_run_again_gives_the_same_group() -> None:
    async def main(seed: int) -> RolloutGroup | GroupFailure:
        generator, *_ = await make(seed)
        return await generator.run_group(assignment(3))

    assert run_virtual(main(1)) == run_virtual(main(1))
    assert run_virtual(main(1)) != run_virtual(main(2))


def test_tokens_are_those_of_the_engine_and_rewards_those_of_their_completions() -> None:
    async def main() -> None:
        generator, engine, scorer = await make()
        group = await generator.run_group(assignment(3))
        assert isinstance(group, RolloutGroup)
        ((prompt, texts),) = scorer.seen
        assert prompt is PROMPT
        for rollout, text, reward in zip(group.rollouts, texts, (1.0, 0.5), strict=True):
            tokens = rollout.completion_ids.numpy().tolist()
            made = [
                fake_token(engine.weights, list(b"12>"), rollout.seed, position)
                for position in range(3)
            ]
            assert tokens == [token for token, _ in made]
            assert rollout.behavior_logprobs.numpy() == pytest.approx([p for _, p in made])
            assert engine.decode(tokens) == text
            assert rollout.reward == reward
            assert rollout.finish_reason == "length"
        assert group.epoch == 1

    run_virtual(main())


def test_a_timeout_leaves_nothing_in_the_engine_and_others_go_on() -> None:
    async def main() -> None:
        slow = {sample_seed(0, 1, 0, 0)}
        generator, engine, _ = await make(delay_s=lambda _, p: 1e6 if p.seed in slow else 1.0)
        outcomes = await asyncio.gather(
            *(generator.run_group(assignment(group)) for group in range(3))
        )
        assert [type(outcome) for outcome in outcomes] == [
            RolloutGroup, GroupFailure, RolloutGroup,
        ]  # fmt: skip
        failure = outcomes[1]
        assert isinstance(failure, GroupFailure)
        assert (failure.group_id, failure.attempt, failure.reason) == (1, 0, "timeout")
        assert asyncio.get_running_loop().time() == generator.config.rollout.group_timeout_s
        assert engine.stats().running == engine.stats().waiting == 0

    run_virtual(main())


def test_what_nobody_expected_is_not_taken_for_a_failed_group() -> None:
    class Broken(Scorer):
        async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
            raise ZeroDivisionError("a bug of ours")

    async def main() -> None:
        generator, *_ = await make()
        with pytest.raises(ZeroDivisionError):
            await generator._replace(scorer=Broken()).run_group(assignment())

    run_virtual(main())


def test_an_evaluation_samples_as_asked_and_is_pinned() -> None:
    asked: list[SamplingParams] = []

    def note(_: Sequence[int], params: SamplingParams) -> float:
        asked.append(params)
        return 0.0

    async def main() -> None:
        generator, *_ = await make(version=4, delay_s=note)
        request = EvaluatePolicy(4, first=0, count=1, samples=2, temperature=0.0)
        assert await generator.evaluate(PROMPT, request) == 0.75  # of 1.0 and 0.5
        assert {params.temperature for params in asked} == {0.0}
        assert len({params.seed for params in asked}) == 2
        training = {sample_seed(0, group, 0, sample) for group in range(9) for sample in range(9)}
        assert not training & {params.seed for params in asked}
        with pytest.raises(VersionError, match=r"evaluation of version 3 got tokens .* \[4\]"):
            await generator.evaluate(PROMPT, EvaluatePolicy(3, 0, 1, 1, 0.0))

    run_virtual(main())


def test_an_aborted_completion_is_no_result() -> None:
    class Aborts(FakeEngine):
        async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
            completion = await super().generate(prompt_ids, params)
            return completion._replace(finish_reason="abort")

    async def main() -> None:
        generator, *_ = await make()
        engine = Aborts()
        await engine.stamp(0)
        generator = generator._replace(engine=engine)
        with pytest.raises(GenerationFailed, match="a completion was aborted"):
            await generator.evaluate(PROMPT, EvaluatePolicy(0, 0, 1, 1, 0.0))

    run_virtual(main())
