"""From a prompt to scored rollouts: what a RolloutActor does with its engine for one group.

Consumes an assignment, or a held-out prompt; produces a `RolloutGroup`, a `GroupFailure`, or a mean
reward. Waits for the engine, for the environment between two turns, and for the scorer; the group's
deadline ends all three. A failed trajectory fails its group: it is never torn.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ratchet.actors.trajectory import Trajectory, sample_seed, turn_seed
from ratchet.backends.rollout.base import RolloutEngine, SamplingParams
from ratchet.config import Config
from ratchet.errors import GenerationFailed, PromptTooLong, RewardFailed, TaskError, VersionError
from ratchet.messages import EvaluatePolicy, Message
from ratchet.tasks.base import Conversation, Step
from ratchet.types import Assignment, PolicyVersion, Prompt, RolloutGroup


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


class Generator(NamedTuple):
    """An engine and a scorer, with the run's sampling parameters."""

    config: Config
    engine: RolloutEngine
    scorer: Scorer

    async def run_group(
        self, assignment: Assignment, sample_ended: Callable[[], None] | None = None
    ) -> RolloutGroup | GroupFailure:
        """Generate and score a group within `rollout.group_timeout_s`; a failure is a value.

        Args:
            assignment: the group.
            sample_ended: called whenever the engine is done with one of its trajectories.
        """
        timeout_s = self.config.rollout.group_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._generate_group(assignment, sample_ended)
        except TimeoutError:
            reason, detail = "timeout", f"not done within {timeout_s} s"
        except PromptTooLong as error:
            reason, detail = "prompt", str(error)
        except GenerationFailed as error:
            reason, detail = "generation", str(error)
        except RewardFailed as error:
            reason, detail = error.reason, str(error)
        return GroupFailure(assignment.group_id, assignment.attempt, reason, detail)

    async def evaluate(self, prompt: Prompt, request: EvaluatePolicy) -> float:
        """Return the mean reward of a held-out prompt.

        Raises:
            GenerationFailed, RewardFailed: if there is no result for this prompt.
            VersionError: if a token came from another version.
        """
        group = f"eval/{prompt.prompt_id}"  # the same draws for every version
        seeds = [sample_seed(self.config.seed, group, 0, i) for i in range(request.samples)]
        trajectories = await self._complete(prompt, seeds, request.temperature)
        if any(each.finish_reason in {"abort", "error"} for each in trajectories):
            raise GenerationFailed("a completion was aborted: what it would have said is not known")
        _check_pinned(trajectories, request.version)
        rewards = await self._score(prompt, trajectories)
        return math.fsum(rewards) / len(rewards)

    async def _generate_group(
        self, assignment: Assignment, sample_ended: Callable[[], None] | None
    ) -> RolloutGroup:
        prompt = assignment.prompt
        seeds = [
            sample_seed(self.config.seed, assignment.group_id, assignment.attempt, sample)
            for sample in range(assignment.group_size)
        ]
        temperature = self.config.rollout.temperature
        trajectories = await self._complete(prompt, seeds, temperature, sample_ended)
        rewards = await self._score(prompt, trajectories)
        return RolloutGroup(
            assignment.group_id,
            assignment.attempt,
            prompt.prompt_id,
            assignment.epoch,
            tuple(
                trajectory.rollout(reward)
                for trajectory, reward in zip(trajectories, rewards, strict=True)
            ),
        )

    async def _complete(
        self,
        prompt: Prompt,
        seeds: Sequence[int],
        temperature: float,
        sample_ended: Callable[[], None] | None = None,
    ) -> list[Trajectory]:
        """Generate all or none: the first failure takes the others out of the engine."""
        prompt_ids = self.engine.encode(prompt.text)
        trajectories = [Trajectory(prompt_ids, seed) for seed in seeds]
        try:
            async with asyncio.TaskGroup() as group:
                for trajectory in trajectories:
                    task = group.create_task(self._play(prompt, trajectory, temperature))
                    if sample_ended is not None:
                        # for what is taken out the end of the group speaks
                        task.add_done_callback(lambda done: done.cancelled() or sample_ended())
        except* (GenerationFailed, RewardFailed, TaskError) as failures:
            raise failures.exceptions[0] from None
        return trajectories

    async def _play(self, prompt: Prompt, trajectory: Trajectory, temperature: float) -> None:
        """Let the policy and the environment take turns until one of them, or the room, ends."""
        engine, max_turns = self.engine, self.scorer.max_turns(prompt)
        max_tokens = self.config.rollout.max_tokens
        while True:
            seed = turn_seed(trajectory.seed, trajectory.num_turns)
            params = SamplingParams(max_tokens, temperature, seed)
            completion = await engine.generate(trajectory.token_ids, params)
            text = engine.decode(completion.token_ids.numpy().tolist())
            trajectory.add_turn(completion, text)
            if max_turns == 1 or completion.finish_reason != "stop":
                return  # half a turn has no answer
            step = await self.scorer.step(prompt, trajectory.conversation)
            trajectory.note(step.state)
            if step.reply is None or trajectory.num_turns >= max_turns:
                return
            reply_ids = engine.encode_reply(step.reply)
            if engine.context is not None:
                room = engine.context - len(trajectory.token_ids) - len(reply_ids)
                if room < 1:
                    trajectory.finish_reason = "length"
                    return
                max_tokens = min(max_tokens, room)
            trajectory.add_reply(reply_ids, step.reply)

    async def _score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[float]:
        conversations = [trajectory.conversation for trajectory in trajectories]
        if self.scorer.max_turns(prompt) == 1:
            texts = [conversation.turns[0] for conversation in conversations]
            rewards = await self.scorer.score(prompt, texts)
        else:
            rewards = await self.scorer.score_conversations(prompt, conversations)
        if len(rewards) != len(conversations) or not all(map(math.isfinite, rewards)):
            msg = (
                f"rewards of prompt {prompt.prompt_id} are {rewards} for {len(conversations)}"
                " completions"
            )
            raise RewardFailed(msg)
        return rewards


def _check_pinned(trajectories: Sequence[Trajectory], version: PolicyVersion) -> None:
    others = {made for trajectory in trajectories for made in trajectory.versions} - {version}
    if others:
        msg = f"an evaluation of version {version} got tokens of versions {sorted(others)}"
        raise VersionError(msg)
