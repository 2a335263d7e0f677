"""A scorer with real processes, which are all gone when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
from tests.helpers import rewards
from tests.helpers.actors import RecordingLog
from tests.helpers.config import small_config

from ratchet.errors import RewardFailed
from ratchet.runtime.reward_pool import ProcessScorer
from ratchet.subreaper import children
from ratchet.tasks.registry import build_task
from ratchet.types import Prompt

FILE = rewards.__file__
DEADLINE_S = 30.0


def config(**task: Any) -> Any:
    return small_config(task={"reward": f"{FILE}:reward", "reward_workers": 1} | task)


@contextlib.asynccontextmanager
async def scoring(
    environ: Mapping[str, str] = os.environ, **task: Any
) -> AsyncIterator[ProcessScorer]:
    """A scorer whose processes are all gone at the end."""
    before = children(os.getpid())
    whole = config(**task)
    own = build_task(whole.task, 0) if "Unbuildable" not in whole.task.name else None
    scorer = ProcessScorer(whole, own, environ=environ, log=RecordingLog())  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield scorer
    finally:
        scorer.close()
        await until(lambda: not children(os.getpid()) - before)


def prompt(word: str) -> Prompt:
    return Prompt("p7", word)


async def fails(scorer: ProcessScorer, word: str, argument: str = "1") -> RewardFailed:
    with pytest.raises(RewardFailed) as failed:
        await scorer.score(prompt(word), [argument])
    return failed.value


async def pid(scorer: ProcessScorer) -> float:
    return (await scorer.score(prompt("pid"), ["1"]))[0]


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not happened():  # noqa: ASYNC110 - it happens in other processes
            await asyncio.sleep(0.01)


async def until_gone(number: int) -> None:
    await until(lambda: not os.path.exists(f"/proc/{number}"))  # noqa: PTH110
