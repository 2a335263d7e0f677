"""Rewards away from the event loop: a thread calls the task, and the loop goes on.

Consumes a prompt and completions, produces rewards or `RewardFailed`; waits for the user's code, as
long as the group's own deadline allows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Real

from ratchet.errors import RewardFailed
from ratchet.tasks.base import Task
from ratchet.types import Prompt


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
        return await loop.run_in_executor(self._threads, self._score, prompt, completions)

    def close(self) -> None:
        """Begin nothing more; the threads end with what they run."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        return [self._one(prompt, completion) for completion in completions]

    def _one(self, prompt: Prompt, completion: str) -> float:
        try:
            reward: object = self._task.score(prompt, completion)
        except (Exception, SystemExit) as error:  # sys.exit() in a reward does not end the worker
            msg = f"the reward of prompt {prompt.prompt_id} raised {type(error).__name__}: {error}"
            raise RewardFailed(msg) from error
        # a bool is a number to Python, and a usual reward; numpy's numbers are `Real` as well
        if not isinstance(reward, Real):
            msg = f"the reward of prompt {prompt.prompt_id} is {reward!r}, not a number"
            raise RewardFailed(msg)
        try:
            return float(reward)
        except OverflowError:
            msg = f"the reward of prompt {prompt.prompt_id} is too large for a float"
            raise RewardFailed(msg) from None
