"""Where rewards run: in processes that can be killed, or in threads of the rollout worker.

Consumes `[task]` of the configuration, produces a `Scorer`; waits for nothing. A thread costs less
and cannot be ended: a reward that never returns holds it, and what it leaks is the worker's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, ParamSpec, TypeVar

from ratchet.actors.generation import Scorer
from ratchet.config import Config, TaskConfig
from ratchet.observability.logs import Log
from ratchet.runtime.judge import judge, max_turns, take_step
from ratchet.runtime.reward_pool import ProcessScorer
from ratchet.tasks.base import Conversation, Step, Task
from ratchet.types import Prompt

P = ParamSpec("P")
T = TypeVar("T")

_OURS: Final = frozenset({"copy", "dataset", "guess", "jsonl"})
"""Tasks whose own score, where it compares text, is a few microseconds of code that is all ours."""


def open_scorer(config: Config, task: Task, *, in_process: bool, log: Log) -> Scorer:
    """Return the scorer of a rollout worker, on the running loop.

    Args:
        config: of the run.
        task: as it is built here; processes build their own.
        in_process: whether the whole run is in this process, where a reward may be a closure.
        log: of the worker.

    Raises:
        TaskError: if a variable of `task.reward_env` is not set.
    """
    isolation = config.task.reward_isolation
    if isolation == "auto":
        isolation = "thread" if in_process or _is_ours(config.task) else "process"
    if isolation == "thread":
        return ThreadScorer(task, config.task.reward_workers)
    return ProcessScorer(config, task, environ=os.environ, log=log)


def _is_ours(task: TaskConfig) -> bool:
    return task.reward is None and all(
        part.reward is None and part.name in _OURS and part.args.get("score", "exact") == "exact"
        for part in (task.tasks or (task,))
    )


class ThreadScorer:
    """Implements `Scorer`: a call of a thread for a group, or for a step."""

    def __init__(self, task: Task, num_threads: int = 2) -> None:
        self._task = task
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="reward")

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        """Return one reward per completion.

        Raises:
            RewardFailed: with the reason.
        """
        return await self._run(self._rewards, prompt, completions)

    def max_turns(self, prompt: Prompt) -> int:
        """Return how many turns the policy has at most."""
        return max_turns(self._task, prompt)

    async def step(self, prompt: Prompt, conversation: Conversation) -> Step:
        """Answer the last turn, where `max_turns` is more than 1; raises as `score`."""
        return await self._run(take_step, self._task, prompt, conversation)

    async def score_conversations(
        self, prompt: Prompt, conversations: Sequence[Conversation]
    ) -> list[float]:
        """Return one reward per conversation; raises as `score`."""
        return await self._run(self._rewards, prompt, conversations)

    def close(self) -> None:
        """Begin nothing more; the threads end with what they run."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        call = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _rewards(
        self, prompt: Prompt, answers: Sequence[str] | Sequence[Conversation]
    ) -> list[float]:
        return [judge(self._task, prompt, answer) for answer in answers]
