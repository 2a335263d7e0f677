"""An engine under the contract of rollout engines, and what its tests do with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import torch

from ratchet.backends.rollout.base import Completion, EngineStats, RolloutEngine, SamplingParams
from ratchet.types import PauseMode

CONTEXT = 4096
SHORT = SamplingParams(max_tokens=6, temperature=1.0, seed=1)
GREEDY = SHORT._replace(temperature=0.0)


class Subject(NamedTuple):
    """An engine, and what differs where it must."""

    make: Callable[[], RolloutEngine]
    context: int = CONTEXT
    has_seeds: bool = True
    """the same seed makes the same tokens"""
    reads_back: bool = True
    url: str | None = None
    """of the server that has the batch; tokens then count when their completion is there"""

    async def some_tokens(self, engine: RolloutEngine, before: EngineStats, running: int) -> None:
        """Wait until each of the running requests has a token."""
        if self.url is None:
            wanted = before.generated_tokens + 2 * running
            await until(lambda: engine.stats().generated_tokens >= wanted)
        else:
            await self.batch_of(running)

    async def batch_of(self, size: int) -> None:
        """Wait until the server itself says that so many requests run."""
        assert self.url is not None
        async with aiohttp.ClientSession(self.url) as session:
            found = -1
            while found != size:
                async with session.get("/v1/loads") as response:
                    found = (await response.json())["loads"][0]["num_running_reqs"]


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test

    asyncio.run(bounded())


@asynccontextmanager
async def started(subject: Subject, version: int | None = 0) -> AsyncIterator[RolloutEngine]:
    engine = subject.make()
    await engine.start()
    if version is not None:
        await engine.stamp(version)
    try:
        yield engine
    finally:
        await engine.close()


def new_weights(engine: RolloutEngine, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: 0.3 * torch.randn(spec.shape, generator=generator)
        for spec in engine.specs()
        if spec.alias_of is None
    }


async def load(engine: RolloutEngine, version: int, mode: PauseMode = "in_place") -> None:
    await engine.pause(mode)
    await engine.write(new_weights(engine, version))
    await engine.stamp(version)
    await engine.resume()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - engines have totals, not events
        await asyncio.sleep(0.0005)


async def paused_halfway(
    subject: Subject, engine: RolloutEngine, mode: PauseMode
) -> list[asyncio.Task[Completion]]:
    """Pause while requests have some of their tokens, but not all."""
    for max_tokens in (100, 400, 1600):
        before = engine.stats()
        tasks = [
            asyncio.create_task(engine.generate([5, 6, 7], SamplingParams(max_tokens, 1.0, seed)))
            for seed in range(3)
        ]
        await subject.some_tokens(engine, before, len(tasks))
        await engine.pause(mode)
        if not any(task.done() for task in tasks):
            return tasks
        await engine.resume()
        await asyncio.gather(*tasks)
    raise AssertionError("the engine is too fast to be paused")


def tokens_of(completion: Completion) -> list[int]:
    return completion.token_ids.numpy().tolist()


def assert_whole(completion: Completion) -> None:
    length = len(completion.token_ids)
    assert 1 <= length == len(completion.logprobs)
    assert completion.spans[0].start == 0
    assert completion.spans[-1].end == length
    for left, right in pairwise(completion.spans):
        assert left.end == right.start
        assert left.version != right.version
    assert all(span.start < span.end for span in completion.spans)
    logprobs = completion.logprobs.numpy()
    assert np.isfinite(logprobs).all()
    assert (logprobs <= 0).all()
