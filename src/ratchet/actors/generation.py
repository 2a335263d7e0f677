"""From a prompt to scored rollouts: what a RolloutActor does with its engine for one group.

Consumes an assignment, or a held-out prompt; produces a `RolloutGroup`, a `GroupFailure`, or a mean
reward. Waits for the engine and for the scorer; the group's deadline ends both.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ratchet.backends.rollout.base import Completion, RolloutEngine, SamplingParams
from ratchet.config import Config
from ratchet.errors import GenerationFailed, PromptTooLong, RewardFailed, VersionError
from ratchet.messages import EvaluatePolicy, Message
from ratchet.tasks.base import Conversation, Step
from ratchet.types import Assignment, Packed, PolicyVersion, Prompt, Rollout, RolloutGroup


class Scorer(Protocol):
    """The task's own code, away from the event loop."""

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        """Return one reward per completion.

        Raises:
            RewardFailed: if the reward raised, or is not a number.
        """
        ...

    def max_turns(self, prompt: Prompt) -> int:
        """Return what the task says of this prompt; 1 where it is no `MultiTurnTask`. At once."""
        ...

    async def step(self, prompt: Prompt, conversation: Conversation) -> Step:
        """Answer the last turn of one trajectory; any process may, as all state comes along.

        Raises:
            RewardFailed: if the environment raised, or did not return a `Step`.
        """
        ...

    async def score_conversations(
        self, prompt: Prompt, conversations: Sequence[Conversation]
    ) -> list[float]:
        """Return one reward per ended conversation; raises as `score`."""
        ...

    def close(self) -> None:
        """Begin nothing more, and end once what runs has ended. Idempotent; does not wait."""
        ...


class GroupFailure(Message, frozen=True):
    """Why a group has no rollouts. It stays in its process."""

    group_id: int
    attempt: int
    reason: str
    detail: str


def sample_seed(run_seed: int, group: int | str, attempt: int, sample: int) -> int:
    """Return the seed of one sample: another one for each run, group, attempt and sample."""
    text = f"{run_seed}/{group}/{attempt}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class Generator(NamedTuple):
    """An engine and a scorer, with the run's sampling parameters."""

    config: Config
    engine: RolloutEngine
    scorer: Scorer

    async def run_group(self, assignment: Assignment) -> RolloutGroup | GroupFailure:
        """Generate and score a group within `rollout.group_timeout_s`; a failure is a value."""
        timeout_s = self.config.rollout.group_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._generate_group(assignment)
        except TimeoutError:
            reason, detail = "timeout", f"not done within {timeout_s} s"
        except PromptTooLong as error:
            reason, detail = "prompt", str(error)
        except GenerationFailed as error:
            reason, detail = "generation", str(error)
        except RewardFailed as error:
            reason, detail = "reward", str(error)
        return GroupFailure(assignment.group_id, assignment.attempt, reason, detail)

    async def evaluate(self, prompt: Prompt, request: EvaluatePolicy) -> float:
        """Return the mean reward of a held-out prompt.

        Raises:
            GenerationFailed, RewardFailed: if there is no result for this prompt.
            VersionError: if a token came from another version.
        """
        group = f"eval/{prompt.prompt_id}"  # the same draws for every version
        seeds = [sample_seed(self.config.seed, group, 0, i) for i in range(request.samples)]
        completions = await self._complete(prompt, seeds, request.temperature)
        _check_pinned(completions, request.version)
        rewards = await self._score(prompt, completions)
        return math.fsum(rewards) / len(rewards)

    async def _generate_group(self, assignment: Assignment) -> RolloutGroup:
        prompt = assignment.prompt
        seeds = [
            sample_seed(self.config.seed, assignment.group_id, assignment.attempt, sample)
            for sample in range(assignment.group_size)
        ]
        completions = await self._complete(prompt, seeds, self.config.rollout.temperature)
        rewards = await self._score(prompt, completions)
        prompt_ids = Packed.of(self.engine.encode(prompt.text), "int32")
        rollouts = tuple(
            Rollout(
                prompt_ids=prompt_ids,
                completion_ids=completion.token_ids,
                behavior_logprobs=completion.logprobs,
                loss_mask=Packed("uint8", b"\x01" * len(completion.token_ids)),
                spans=completion.spans,
                finish_reason=completion.finish_reason,
                reward=reward,
                seed=seed,
            )
            for completion, reward, seed in zip(completions, rewards, seeds, strict=True)
        )
        return RolloutGroup(
            assignment.group_id, assignment.attempt, prompt.prompt_id, assignment.epoch, rollouts
        )

    async def _complete(
        self, prompt: Prompt, seeds: Sequence[int], temperature: float
    ) -> list[Completion]:
        """Generate all or none: the first failure takes the others out of the engine."""
        prompt_ids = self.engine.encode(prompt.text)
        max_tokens = self.config.rollout.max_tokens
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        self.engine.generate(
                            prompt_ids, SamplingParams(max_tokens, temperature, seed)
                        )
                    )
                    for seed in seeds
                ]
        except* GenerationFailed as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        texts = [self.engine.decode(c.token_ids.numpy().tolist()) for c in completions]
        rewards = await self.scorer.score(prompt, texts)
        if len(rewards) != len(texts) or not all(map(math.isfinite, rewards)):
            msg = f"rewards of prompt {prompt.prompt_id} are {rewards} for {len(texts)} completions"
            raise RewardFailed(msg)
        return rewards


def _check_pinned(completions: Sequence[Completion], version: PolicyVersion) -> None:
    others = {span.version for c in completions for span in c.spans} - {version}
    if others:
        msg = f"an evaluation of version {version} got tokens of versions {sorted(others)}"
        raise VersionError(msg)
