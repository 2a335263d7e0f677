"""What stands in for a model, a device, a reward and a screen in a world."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.simulation.weight_ends import (
    SeenEngine,
)

from ratchet.backends.rollout.base import Completion, SamplingParams
from ratchet.backends.training.base import GradientReport, StepReport
from ratchet.backends.training.fake import FakeBackend
from ratchet.errors import RewardFailed
from ratchet.tasks.base import Conversation, Step
from ratchet.types import Prompt, Rollout, RolloutGroup


class Output:
    """Keeps what the trainer would write."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.summaries: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []

    def begin(self, step: int) -> None:
        pass

    def step(self, metrics: Mapping[str, Any]) -> None:
        self.lines.append(dict(metrics))

    def evaluation(self, evaluation: Mapping[str, Any]) -> None:
        self.evaluations.append(dict(evaluation))

    def summary(self, summary: Mapping[str, Any]) -> None:
        self.summaries.append(dict(summary))

    async def model(self, backend: object) -> None:
        pass


class RecordingBackend(FakeBackend):
    """Remembers which attempt of which group changed the weights."""

    def __init__(self, **script: Any) -> None:
        super().__init__(**script)
        self.applied: list[tuple[int, int]] = []
        self.steps: list[list[tuple[int, int]]] = []
        """the same, by step"""
        self.trained_versions: dict[tuple[int, int], set[int]] = {}
        """of the tokens of each that the loss mask left"""
        self.trained_rollouts: dict[tuple[int, int], tuple[bool, ...]] = {}
        """of each rollout of each, whether a token was trained"""
        self._given: dict[tuple[int, int], set[int]] = {}
        self._rollouts: dict[tuple[int, int], tuple[bool, ...]] = {}

    async def forward_backward(self, groups: Sequence[RolloutGroup]) -> GradientReport:
        given = {(group.group_id, group.attempt): _trained_versions(group) for group in groups}
        self._given = {key: versions for key, versions in given.items() if versions}
        self._rollouts = {
            (g.group_id, g.attempt): tuple(r.num_trained_tokens > 0 for r in g.rollouts)
            for g in groups
        }
        return await super().forward_backward(groups)

    async def optimizer_step(self) -> StepReport:
        report = await super().optimizer_step()
        if report.applied:
            self.applied += self._given
            self.steps.append(list(self._given))
            self.trained_versions |= self._given
            self.trained_rollouts |= self._rollouts
        return report


def _trained_versions(group: RolloutGroup) -> set[int]:
    return {
        span.version
        for rollout in group.rollouts
        for span in rollout.spans
        if 1 in rollout.loss_mask.numpy()[span.start : span.end]
    }


def answer(turn: str) -> str | None:
    """What the environment says to a turn, if anything."""
    return None if reward(turn) > 0.8 else "so?"


def whole(conversation: Conversation) -> str:
    """Everything behind the prompt."""
    pairs = itertools.zip_longest(conversation.turns, conversation.replies, fillvalue="")
    return "".join(itertools.chain.from_iterable(pairs))


class AbortingEngine(SeenEngine):
    """Says of some completions that they were aborted."""

    def __init__(self, aborts: Callable[[], bool], **script: Any) -> None:
        super().__init__(**script)
        self._aborts = aborts

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        completion = await super().generate(prompt_ids, params)
        return completion._replace(finish_reason="abort") if self._aborts() else completion


def reward(text: str) -> float:
    """A reward that depends on the tokens."""
    return sum(map(ord, text)) % 7 / 6


class Scorer:
    """Scores by `reward`; it fails while `broken()` says so, and so does its environment."""

    def __init__(self, broken: Callable[[], bool] = lambda: False, num_turns: int = 1) -> None:
        self._broken = broken
        self._num_turns = num_turns

    def max_turns(self, prompt: Prompt) -> int:
        del prompt
        return self._num_turns

    async def step(self, prompt: Prompt, conversation: Conversation) -> Step:
        if self._broken():
            raise RewardFailed(f"no answer for {prompt.prompt_id}")
        number = len(conversation.turns)
        assert conversation.state == (None if number == 1 else number - 1), conversation
        return Step(answer(conversation.turns[-1]), state=number)

    async def score_conversations(
        self, prompt: Prompt, conversations: Sequence[Conversation]
    ) -> list[float]:
        return await self.score(prompt, list(map(whole, conversations)))

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        if self._broken():
            raise RewardFailed(f"no reward for {prompt.prompt_id}")
        return list(map(reward, completions))

    def close(self) -> None:
        pass


def turns_of(rollout: Rollout) -> list[tuple[int | None, int]]:
    """Return (turn, where it starts) of each token; the turn is None for the environment's."""
    turns: list[tuple[int | None, int]] = []
    number, start = -1, 0
    sampled = [logprob != 0.0 for logprob in rollout.behavior_logprobs.numpy().tolist()]
    for position, here in enumerate(sampled):
        if here and not (position and sampled[position - 1]):
            number, start = number + 1, position
        turns.append((number if here else None, start))
    return turns
