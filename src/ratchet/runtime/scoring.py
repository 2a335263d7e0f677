"""Rewards away from the event loop: a thread calls the task, and the loop goes on.

Consumes a prompt and completions, produces rewards or `RewardFailed`; waits for the user's code, as
long as the group's own deadline allows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Real
from typing import TypeVar

from ratchet.errors import RewardFailed
from ratchet.tasks.base import Conversation, MultiTurnTask, Step, Task
from ratchet.types import Prompt

T = TypeVar("T")


class ThreadScorer:
    """Scores one group per call of a thread."""

    def __init__(self, task: Task, num_threads: int = 2) -> None:
        self._task = task
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="reward")

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        """Return one reward per completion.

        Raises:
            RewardFailed: if the reward raised, or did not return a number.
        """
        loop = asyncio.get_running_loop()
        score = self._task.score
        return await loop.run_in_executor(self._threads, _rewards, score, prompt, completions)

    def max_turns(self, prompt: Prompt) -> int:
        """Return how many turns the policy has at most."""
        return self._task.max_turns(prompt) if isinstance(self._task, MultiTurnTask) else 1

    async def step(self, prompt: Prompt, conversation: Conversation) -> Step:
        """Answer the last turn; only where `max_turns` is more than 1.

        Raises:
            RewardFailed: if the environment raised, or did not return a `Step`.
        """
        loop = asyncio.get_running_loop()
        step = self._environment.step
        answer = await loop.run_in_executor(self._threads, _call, step, prompt, conversation)
        if not isinstance(answer, Step):
            msg = f"the environment of prompt {prompt.prompt_id} returned {answer!r}, not a Step"
            raise RewardFailed(msg)
        return answer

    async def score_conversations(
        self, prompt: Prompt, conversations: Sequence[Conversation]
    ) -> list[float]:
        """Return one reward per conversation; raises as `score`."""
        loop = asyncio.get_running_loop()
        score = self._environment.score_conversation
        return await loop.run_in_executor(self._threads, _rewards, score, prompt, conversations)

    def close(self) -> None:
        """Begin nothing more; the threads end with what they run."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def _environment(self) -> MultiTurnTask:
        if not isinstance(self._task, MultiTurnTask):
            msg = f"{self._task!r} is a task of one turn"
            raise TypeError(msg)
        return self._task


def _rewards(
    score: Callable[[Prompt, T], object], prompt: Prompt, answers: Sequence[T]
) -> list[float]:
    return [_reward(score, prompt, answer) for answer in answers]


def _reward(score: Callable[[Prompt, T], object], prompt: Prompt, answer: T) -> float:
    reward = _call(score, prompt, answer)
    # a bool is a number to Python, and a usual reward; numpy's numbers are `Real` as well
    if not isinstance(reward, Real):
        msg = f"the reward of prompt {prompt.prompt_id} is {reward!r}, not a number"
        raise RewardFailed(msg)
    try:
        return float(reward)
    except OverflowError:
        msg = f"the reward of prompt {prompt.prompt_id} is too large for a float"
        raise RewardFailed(msg) from None


def _call(function: Callable[[Prompt, T], object], prompt: Prompt, argument: T) -> object:
    try:
        return function(prompt, argument)
    except (Exception, SystemExit) as error:  # sys.exit() in a reward does not end the worker
        msg = f"the reward of prompt {prompt.prompt_id} raised {type(error).__name__}: {error}"
        raise RewardFailed(msg) from error
