"""Trajectories of several turns: what engine and environment are asked, and what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tests.helpers.config import small_config
from tests.simulation.loop import run_virtual

from ratchet.actors.generation import Generator, GroupFailure
from ratchet.actors.trajectory import sample_seed, turn_seed
from ratchet.backends.rollout.base import SamplingParams
from ratchet.backends.rollout.fake import NAME, FakeEngine, fake_token
from ratchet.errors import RewardFailed, TaskError
from ratchet.messages import EvaluatePolicy
from ratchet.tasks.base import Conversation, Step
from ratchet.types import Assignment, Prompt, Rollout, RolloutGroup

PROMPT = Prompt("p", "12>")
MAX_TOKENS = 4
LENGTH = 3
"""of each turn, as it ends by itself"""


class Environment:
    """A scorer whose task counts the turns and says how many there were."""

    def __init__(self, max_turns: int = 3, *, over_after: int = 99, reply: str = "no;") -> None:
        self._max_turns, self._over_after, self._reply = max_turns, over_after, reply
        self.asked: list[Conversation] = []
        self.scored: list[Conversation] = []

    def max_turns(self, prompt: Prompt) -> int:
        assert prompt is PROMPT
        return self._max_turns

    async def step(self, prompt: Prompt, conversation: Conversation) -> Step:
        assert prompt is PROMPT
        self.asked.append(conversation)
        await asyncio.sleep(0.5)
        number = len(conversation.turns)
        assert conversation.state == (number - 1 or None)
        return Step(self._reply if number < self._over_after else None, state=number)

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        raise AssertionError("a conversation is not a completion")

    async def score_conversations(
        self, prompt: Prompt, conversations: Sequence[Conversation]
    ) -> list[float]:
        self.scored += conversations
        return [float(index) for index in range(len(conversations))]

    def close(self) -> None:
        pass


def assignment(attempt: int = 0) -> Assignment:
    return Assignment(3, attempt, 1, PROMPT, 2, 30.0)


async def make(scorer: Any, **engine: Any) -> tuple[Generator, FakeEngine]:
    engine = {"stop_after": lambda *_: LENGTH} | engine
    fake = FakeEngine(**engine)
    await fake.start()
    await stamp(fake, 0)
    return Generator(small_config(rollout={"max_tokens": MAX_TOKENS}), fake, scorer), fake


async def stamp(engine: FakeEngine, version: int) -> None:
    await engine.write({NAME: weights(version)})
    await engine.stamp(version)


def weights(version: int) -> np.ndarray:
    return np.full(4, version, np.float32)


async def play(generator: Generator) -> tuple[Rollout, ...]:
    group = await generator.run_group(assignment())
    assert isinstance(group, RolloutGroup), group
    return group.rollouts


def test_the_prompt_of_a_turn_is_the_tokens_so_far_and_no_others() -> None:
    asked: list[tuple[list[int], SamplingParams]] = []

    def note(prompt_ids: Sequence[int], params: SamplingParams) -> float:
        asked.append((list(prompt_ids), params))
        return 0.0

    async def main() -> None:
        environment = Environment()
        generator, _ = await make(environment, delay_s=note)
        rollouts = await play(generator)
        assert len(asked) == 2 * 3
        for index, rollout in enumerate(rollouts):
            seed = sample_seed(0, 3, 0, index)
            prompt, ids = rollout.prompt_ids.numpy().tolist(), rollout.completion_ids.numpy()
            turns = [(ids_, params) for ids_, params in asked if params.seed in _seeds(seed)]
            assert [params.seed for _, params in turns] == _seeds(seed)
            # a turn has 3 tokens, a reply as well, and the reply to the last turn is not used
            whole = [*prompt, *ids.tolist()]
            assert [ids_ for ids_, _ in turns] == [whole[: 3 + 6 * turn] for turn in range(3)]
            assert len(ids) == 15
            assert rollout.loss_mask.numpy().tolist() == [1, 1, 1, 0, 0, 0] * 2 + [1, 1, 1]
            for start in (3, 9):
                assert bytes(ids[start : start + 3].tolist()) == b"no;"
            for turn, (prefix, params) in enumerate(turns):
                for position in range(LENGTH):
                    token, logprob = fake_token(weights(0), prefix, params.seed, position)
                    assert ids[6 * turn + position] == token
                    assert rollout.behavior_logprobs.numpy()[6 * turn + position] == np.float32(
                        logprob
                    )
            assert (rollout.seed, rollout.finish_reason, rollout.reward) == (seed, "stop", index)
            conversation = environment.scored[index]
            assert conversation.replies == ("no;", "no;")
            assert conversation.state == 3  # of the last turn as well
            assert conversation.seed == seed
            texts = [
                bytes(ids[6 * turn : 6 * turn + 3].tolist()).decode("latin-1") for turn in range(3)
            ]
            assert list(conversation.turns) == texts

    run_virtual(main())


def _seeds(seed: int) -> list[int]:
    return [turn_seed(seed, turn) for turn in range(3)]


def test_the_environment_ends_it() -> None:
    async def main() -> None:
        environment = Environment(max_turns=9, over_after=2)
        generator, _ = await make(environment)
        for rollout in await play(generator):
            assert rollout.loss_mask.numpy().tolist() == [1, 1, 1, 0, 0, 0, 1, 1, 1]
            assert rollout.finish_reason == "stop"
        assert [len(c.turns) for c in environment.scored] == [2, 2]

    run_virtual(main())


def test_half_a_turn_has_no_answer() -> None:
    async def main() -> None:
        environment = Environment()
        generator, _ = await make(environment, stop_after=lambda ids, _: 3 if len(ids) == 3 else 9)
        for rollout in await play(generator):
            assert rollout.loss_mask.numpy().tolist() == [1, 1, 1, 0, 0, 0, 1, 1, 1, 1]
            assert rollout.finish_reason == "length"
        assert len(environment.asked) == 2  # after the first turn of each
        assert [len(c.turns) for c in environment.scored] == [2, 2]

    run_virtual(main())


@pytest.mark.parametrize(
    ("context", "mask"),
    [
        (15, [1, 1, 1, 0, 0, 0, 1, 1, 1]),  # 12 tokens, and 3 of a reply: no room to answer it
        (16, [1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1]),  # room for one token
    ],
)
def test_a_full_context_ends_it(context: int, mask: list[int]) -> None:
    async def main() -> None:
        environment = Environment(max_turns=9)
        generator, _ = await make(environment, context=context)
        for rollout in await play(generator):
            assert rollout.loss_mask.numpy().tolist() == mask
            assert rollout.finish_reason == "length"
        assert len(environment.scored) == 2

    run_virtual(main())


def test_versions_are_those_of_what_was_sampled() -> None:
    async def main() -> None:
        generator, engine = await make(Environment(), delay_s=lambda *_: 3.0)
        task = asyncio.create_task(play(generator))
        await asyncio.sleep(3.25)  # the first turn is over, and the environment thinks
        await stamp(engine, 1)
        for rollout in await task:
            assert [(s.version, s.start, s.end) for s in rollout.spans] == [(0, 0, 6), (1, 6, 15)]

    run_virtual(main())


def test_a_failed_turn_fails_the_group_and_a_retry_begins_anew() -> None:
    class Breaks(Environment):
        broken = True

        async def step(self, prompt: Prompt, conversation: Conversation) -> Step:
            step = await super().step(prompt, conversation)
            if self.broken and len(conversation.turns) == 2:
                raise RewardFailed("the board is gone")
            return step

    async def main() -> None:
        environment = Breaks()
        generator, engine = await make(environment)
        failure = await generator.run_group(assignment())
        assert isinstance(failure, GroupFailure)
        assert (failure.reason, failure.detail) == ("reward", "the board is gone")
        assert environment.scored == []
        assert engine.stats().running == engine.stats().waiting == 0
        environment.broken = False
        environment.asked.clear()
        group = await generator.run_group(assignment(attempt=1))
        assert isinstance(group, RolloutGroup)
        first = [c for c in environment.asked if len(c.turns) == 1]
        assert [(c.replies, c.state) for c in first] == [((), None)] * 2
        assert {r.seed for r in group.rollouts} == {sample_seed(0, 3, 1, i) for i in range(2)}

    run_virtual(main())


def test_a_task_that_does_not_build_where_it_runs_is_told_as_it_is() -> None:
    class Unbuildable(Environment):
        async def step(self, prompt: Prompt, conversation: Conversation) -> Step:
            raise TaskError("task.name does not build")

    async def main() -> None:
        generator, _ = await make(Unbuildable())
        with pytest.raises(TaskError, match=r"task\.name does not build"):
            await generator.run_group(assignment())

    run_virtual(main())


def test_an_environment_that_hangs_ends_with_the_group() -> None:
    class Hangs(Environment):
        async def step(self, prompt: Prompt, conversation: Conversation) -> Step:
            await asyncio.Event().wait()
            raise AssertionError

    async def main() -> None:
        generator, _ = await make(Hangs())
        outcome = await generator.run_group(assignment())
        assert isinstance(outcome, GroupFailure)
        assert outcome.reason == "timeout"

    run_virtual(main())


def test_it_says_when_the_engine_is_done_with_a_trajectory() -> None:
    clock: Callable[[], float] = lambda: asyncio.get_running_loop().time()  # noqa: E731

    async def main() -> None:
        generator, _ = await make(Environment(), delay_s=lambda *_: 3.0)
        ended: list[float] = []
        await generator.run_group(assignment(), lambda: ended.append(clock()))
        assert ended == [pytest.approx(3 * 3.0 + 3 * 0.5)] * 2

    run_virtual(main())


def test_it_says_nothing_of_trajectories_that_are_taken_out() -> None:
    async def main() -> None:
        generator, _ = await make(Environment(), delay_s=lambda *_: 3.0)
        ended: list[None] = []
        task = asyncio.create_task(generator.run_group(assignment(), lambda: ended.append(None)))
        await asyncio.sleep(1.0)
        task.cancel()  # as a worker that ends does: nobody reads its inbox any more
        await asyncio.wait([task])
        assert ended == []

    run_virtual(main())


def test_an_evaluation_has_turns_as_well() -> None:
    async def main() -> None:
        environment = Environment()
        generator, _ = await make(environment)
        assert await generator.evaluate(PROMPT, EvaluatePolicy(0, 0, 1, 2, 0.0)) == 0.5
        assert [len(c.turns) for c in environment.scored] == [3, 3]

    run_virtual(main())
