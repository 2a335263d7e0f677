"""Rewards in processes that can be killed: a small pool of them per rollout worker.

Consumes a prompt and completions, produces rewards or `RewardFailed`, whose reason says what the
user's code did. Waits for a free process, first come first served, and then for the user's code,
each completion no longer than `task.reward_timeout_s`. A process that does not answer, or whose
group is cancelled, is killed with all that it has started, and another takes its place; groups in
the other processes do not notice. All of them end with the worker, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, Final

from ratchet.config import Config
from ratchet.errors import TaskError
from ratchet.observability.logs import Log
from ratchet.runtime.judge import max_turns
from ratchet.runtime.reward_link import RewardProcess, StartFailed
from ratchet.runtime.reward_wire import Build
from ratchet.tasks.base import Conversation, Step, Task
from ratchet.types import Prompt

_FIRST_PAUSE_S: Final = 0.5
_MOST_PAUSE_S: Final = 30.0

_PLACE = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
_LOCALE = ("LANG", "LANGUAGE", "TZ")
_COMPUTE = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE")
_ENV: Final = frozenset((*_PLACE, *_LOCALE, *_COMPUTE))
_ENV_PREFIXES: Final = ("LC_", "PYTHON")


class ProcessScorer:
    """Implements `Scorer`. It must be made on the running loop, where it starts its processes.

    Args:
        config: of the run; `[task]` says what scores, and within which limits.
        task: as it is built in this process; it is asked for `max_turns` alone.
        environ: of this process; only what a reward may know of it is passed on.
        log: of the worker.

    Raises:
        TaskError: if a variable of `task.reward_env` is not set.
    """

    def __init__(self, config: Config, task: Task, *, environ: Mapping[str, str], log: Log) -> None:
        self._task = task
        self._build = Build(
            task=config.task.model_dump_json().encode(),
            seed=config.seed,
            path=list(sys.path),
            max_bytes=config.task.reward_max_mib << 20,
        )
        self._env = reward_environment(environ, config.task.reward_env)
        self._limits = (
            "in a process that scores, which has task.reward_max_mib ="
            f" {config.task.reward_max_mib} of address space, and of the environment only paths,"
            f" locale and task.reward_env = {list(config.task.reward_env)}"
        )
        self._timeout_s = config.task.reward_timeout_s
        self._log = log
        self._free: asyncio.Queue[RewardProcess | Exception] = asyncio.Queue()
        self._work: set[asyncio.Task[None]] = set()
        self._pause_s = _FIRST_PAUSE_S
        self._proven = False  # the task has built in a process
        self._closed = False
        for _ in range(config.task.reward_workers):
            self._spawn(self._add())

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        """Return one reward per completion.

        Raises:
            RewardFailed: with the reason.
            TaskError: if the task does not build in a process.
            RuntimeError: if the scorer is closed.
        """
        async with self._process() as process:
            return await process.score(prompt, completions, self._timeout_s)

    def max_turns(self, prompt: Prompt) -> int:
        """Return how many turns the policy has at most."""
        return max_turns(self._task, prompt)

    async def step(self, prompt: Prompt, conversation: Conversation) -> Step:
        """Answer the last turn, in any process; raises as `score`."""
        async with self._process() as process:
            return await process.step(prompt, conversation, self._timeout_s)

    async def score_conversations(
        self, prompt: Prompt, conversations: Sequence[Conversation]
    ) -> list[float]:
        """Return one reward per conversation; raises as `score`."""
        async with self._process() as process:
            return await process.score(prompt, conversations, self._timeout_s)

    def close(self) -> None:
        """End the free processes now, and each other one once its group has ended."""
        self._closed = True
        while not self._free.empty():
            process = self._free.get_nowait()
            if isinstance(process, RewardProcess):
                self._give_back(process)
        self._free.put_nowait(RuntimeError("the scorer is closed"))

    @contextlib.asynccontextmanager
    async def _process(self) -> AsyncIterator[RewardProcess]:
        process = await self._free.get()
        if isinstance(process, Exception):
            self._free.put_nowait(process)  # for everybody who waits
            raise process
        try:
            yield process
        finally:
            self._give_back(process)

    def _give_back(self, process: RewardProcess) -> None:
        if process.clean and not self._closed:
            self._free.put_nowait(process)
            return
        process.kill()  # at once, even if the loop is about to end
        if self._closed:
            self._spawn(process.end())
        else:
            self._log.warning("reward_process_replaced", pid=process.pid)
            self._spawn(self._replace(process))

    async def _replace(self, process: RewardProcess) -> None:
        await process.end()
        await self._add()

    async def _add(self) -> None:
        """Start a process, and again until there is one, unless none ever was."""
        while not self._closed:
            process = RewardProcess(self._build, self._env)
            try:
                await process.start()
            except (StartFailed, OSError) as error:
                self._log.error("reward_process_not_started", detail=str(error))
                if not self._proven:
                    self._free.put_nowait(TaskError(f"{error} ({self._limits})"))
                    return
                await asyncio.sleep(self._pause_s)
                self._pause_s = min(_MOST_PAUSE_S, 2 * self._pause_s)
            else:
                self._proven = True
                self._pause_s = _FIRST_PAUSE_S
                self._log.info("reward_process_started", pid=process.pid)
                self._give_back(process)
                return

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name="reward-process")
        self._work.add(task)
        task.add_done_callback(self._work.discard)


def reward_environment(environ: Mapping[str, str], more: Sequence[str]) -> dict[str, str]:
    """Return what a reward may know of an environment: no token and no key, unless it is named.

    Args:
        environ: of the worker.
        more: names of `task.reward_env`.

    Raises:
        TaskError: if one of those is not set.
    """
    for name in more:
        if name not in environ:
            msg = (
                f"task.reward_env names {name!r}, which is not set in the environment of this"
                " worker; set it, or take it out"
            )
            raise TaskError(msg)
    return {
        name: value
        for name, value in environ.items()
        if name in _ENV or name in more or name.startswith(_ENV_PREFIXES)
    }
