"""What every rollout engine promises, run on each of them; on SGLang's in tests/sglang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import pytest
import torch
from tests.helpers.tiny_models import write_tiny_model

from ratchet.backends.rollout.base import Completion, EngineStats, RolloutEngine, SamplingParams
from ratchet.backends.rollout.fake import FakeEngine
from ratchet.backends.rollout.torch import TorchEngine
from ratchet.errors import GenerationFailed, PromptTooLong, WeightsMismatch
from ratchet.transport.weights.base import ProbedSink
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


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that never stops by itself, so that lengths are known."""
    path = tmp_path_factory.mktemp("engine") / "model"
    return write_tiny_model(path, eos_token_id=[], max_position_embeddings=CONTEXT)


@pytest.fixture(params=["torch", "fake"])
def subject(request: pytest.FixtureRequest, endless_model: Path) -> Subject:
    if request.param == "torch":
        return Subject(lambda: TorchEngine(endless_model, max_batch_size=16))
    return Subject(
        lambda: FakeEngine(context=CONTEXT, delay_s=lambda _, params: 0.001 * params.max_tokens)
    )


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


def test_serves_nothing_before_a_version_is_stamped(subject: Subject) -> None:
    async def scenario() -> None:
        async with started(subject, version=None) as engine:
            assert engine.version is None
            task = asyncio.create_task(engine.generate([5], SHORT))
            await until(lambda: engine.stats().waiting == 1)
            await engine.pause("in_place")
            await engine.resume()
            assert engine.stats().generated_tokens == 0
            assert not task.done()
            await engine.write(new_weights(engine, 3))
            await engine.stamp(3)
            assert engine.version == 3
            assert [span.version for span in (await task).spans] == [3]

    run(scenario())


def test_ids_go_in_and_come_out(subject: Subject) -> None:
    async def scenario() -> None:
        async with started(subject) as engine:
            prompt = engine.encode("12+34=")
            assert len(prompt) == 6
            assert engine.decode(prompt) == "12+34="
            assert engine.encode_reply("=7") == engine.encode("=7")  # there is no template
            assert engine.context == subject.context
            completion = await engine.generate(prompt, SHORT)
            assert_whole(completion)
            assert len(completion.token_ids) == SHORT.max_tokens
            assert completion.finish_reason == "length"
            assert completion.token_ids.dtype == "int32"
            assert completion.logprobs.dtype == "float32"

    run(scenario())


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_each_token_has_the_version_that_made_it(subject: Subject, mode: PauseMode) -> None:
    async def scenario() -> None:
        async with started(subject, version=4) as engine:
            tasks = await paused_halfway(subject, engine, mode)
            await load(engine, 9, mode)
            for completion in await asyncio.gather(*tasks):
                assert_whole(completion)
                assert [span.version for span in completion.spans] == [4, 9]
            fresh = await engine.generate([5], SHORT)
            assert [span.version for span in fresh.spans] == [9]

    run(scenario())


def test_nothing_is_generated_while_paused(subject: Subject) -> None:
    async def scenario() -> None:
        async with started(subject) as engine:
            tasks = await paused_halfway(subject, engine, "in_place")
            made = engine.stats().generated_tokens
            late = asyncio.create_task(engine.generate([5], SHORT))
            await until(lambda: engine.stats().waiting >= 1)
            await engine.pause("in_place")  # a round trip through the engine
            assert engine.stats().generated_tokens == made
            assert not late.done()
            await engine.resume()
            for completion in await asyncio.gather(late, *tasks):
                assert [span.version for span in completion.spans] == [0]

    run(scenario())


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_failed_load_quarantines_until_a_good_one(subject: Subject, mode: PauseMode) -> None:
    async def scenario() -> None:
        async with started(subject, version=1) as engine:
            tasks = await paused_halfway(subject, engine, mode)
            made = engine.stats().generated_tokens
            with pytest.raises(WeightsMismatch, match="no_such_weight"):
                await engine.write({"no_such_weight": torch.zeros(1)})
            assert engine.version is None
            await engine.resume()
            await engine.pause(mode)
            await engine.resume()
            assert engine.stats().generated_tokens == made
            assert not any(task.done() for task in tasks)
            await load(engine, 2, mode)
            for completion in await asyncio.gather(*tasks):
                assert_whole(completion)
                assert [span.version for span in completion.spans] == [1, 2]

    run(scenario())


def test_a_write_quarantines_before_it_is_stamped(subject: Subject) -> None:
    async def scenario() -> None:
        async with started(subject, version=1) as engine:
            await engine.write(new_weights(engine, 2))
            assert engine.version is None
            await engine.stamp(2)
            assert engine.version == 2

    run(scenario())


@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_a_write_of_another_kind_is_refused(subject: Subject, change: str) -> None:
    async def scenario() -> None:
        async with started(subject) as engine:
            name, value = next(iter(new_weights(engine, 1).items()))
            wrong = value[:1] if change == "shape" else value.double()
            with pytest.raises(WeightsMismatch, match=name):
                await engine.write({name: wrong})
            with pytest.raises(WeightsMismatch, match="no_such_weight"):
                await engine.read(["no_such_weight"])

    run(scenario())


def test_reads_back_what_was_written(subject: Subject) -> None:
    async def scenario() -> None:
        async with started(subject) as engine:
            written = new_weights(engine, 5)
            if not subject.reads_back:
                assert isinstance(engine, ProbedSink)
                with pytest.raises(WeightsMismatch, match="probe"):
                    await engine.read(list(written))
                return
            await engine.write(written)
            for name, value in zip(written, await engine.read(list(written)), strict=True):
                assert torch.equal(value, written[name]), name
            for spec in engine.specs():
                if spec.alias_of is not None:
                    [value] = await engine.read([spec.name])
                    assert torch.equal(value, written[spec.alias_of]), spec.name

    run(scenario())


def test_weights_decide_what_is_generated(subject: Subject) -> None:
    async def scenario() -> None:
        async with started(subject) as engine:
            seen = []
            for version in (1, 2, 1):
                await engine.write(new_weights(engine, version))
                await engine.stamp(version)
                seen.append(tokens_of(await engine.generate([5, 6], GREEDY)))
            assert seen[0] == seen[2] != seen[1]

    run(scenario())


CALLS: Sequence[Sequence[str]] = [
    ("resume", "resume"),
    ("in_place", "in_place", "resume"),
    ("in_place", "retract", "in_place", "resume", "resume"),
    ("retract", "resume", "retract", "resume"),
]


@pytest.mark.parametrize("calls", CALLS, ids="-".join)
def test_pause_and_resume_in_any_order(subject: Subject, calls: Sequence[str]) -> None:
    async def scenario() -> None:
        async with started(subject) as engine:
            alone = await engine.generate([5, 6], GREEDY._replace(max_tokens=40))
            tasks = [
                asyncio.create_task(engine.generate([5, 6], GREEDY._replace(max_tokens=40)))
                for _ in range(2)
            ]
            for call in calls:
                await (engine.resume() if call == "resume" else engine.pause(call))  # type: ignore[arg-type]
            for completion in await asyncio.gather(*tasks):
                assert_whole(completion)
                assert tokens_of(completion) == tokens_of(alone)

    run(scenario())


def test_loads_and_requests_in_a_crowd(subject: Subject) -> None:
    async def scenario() -> None:
        async with started(subject) as engine:
            tasks = [
                asyncio.create_task(
                    engine.generate([5] * (1 + i % 7), SamplingParams(10 + 2 * i, 1.0, i))
                )
                for i in range(40)
            ]
            for version in range(1, 6):
                await load(engine, version, "retract" if version % 2 else "in_place")
            for i, completion in enumerate(await asyncio.gather(*tasks)):
                assert_whole(completion)
                assert len(completion.token_ids) == 10 + 2 * i
                versions = [span.version for span in completion.spans]
                assert versions == sorted(versions)
            assert engine.stats().running == engine.stats().waiting == 0

    run(scenario())


def test_a_cancelled_call_leaves_the_batch(subject: Subject) -> None:
    async def scenario() -> None:
        async with started(subject) as engine:
            long = [
                asyncio.create_task(engine.generate([5], SamplingParams(4000, 1.0, i)))
                for i in range(3)
            ]
            await until(lambda: engine.stats().running == 3)
            never_sent = asyncio.create_task(engine.generate([5], SamplingParams(4000, 1.0, 9)))
            await asyncio.sleep(0)
            for task in (*long[:2], never_sent):
                task.cancel()
            await asyncio.gather(*long[:2], never_sent, return_exceptions=True)
            assert all(task.cancelled() for task in (*long[:2], never_sent))
            await until(lambda: engine.stats().running == 1)
            if subject.url is not None:
                await subject.batch_of(1)
            assert engine.stats().waiting == 0
            assert_whole(await engine.generate([5], SHORT))
            assert not long[2].done()
            long[2].cancel()

    run(scenario())


def test_a_request_cancelled_while_it_waits_is_never_served(subject: Subject) -> None:
    async def scenario() -> None:
        async with started(subject, version=None) as engine:
            task = asyncio.create_task(engine.generate([5], SHORT))
            await until(lambda: engine.stats().waiting == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await engine.stamp(0)
            await engine.generate([6], SHORT)
            assert engine.stats().generated_tokens == SHORT.max_tokens

    run(scenario())


def test_what_does_not_fit_is_refused_and_the_engine_lives(subject: Subject) -> None:
    async def scenario() -> None:
        async with started(subject) as engine:
            with pytest.raises(PromptTooLong, match=str(subject.context)):
                await engine.generate([5] * 10, SHORT._replace(max_tokens=subject.context - 9))
            for prompt in ([], [5, -1], [5, 100_000]):
                with pytest.raises(GenerationFailed) as caught:
                    await engine.generate(prompt, SHORT)
                assert not isinstance(caught.value, PromptTooLong)
            for params in (SHORT._replace(max_tokens=0), SHORT._replace(temperature=-1.0)):
                with pytest.raises(GenerationFailed, match="max_tokens"):
                    await engine.generate([5], params)
            assert_whole(await engine.generate([5], SHORT))

    run(scenario())


def test_the_same_seed_makes_the_same_tokens_alone_and_in_a_crowd(
    subject: Subject,
) -> None:
    if not subject.has_seeds:
        pytest.skip("its seeds count only in deterministic inference")

    async def scenario() -> None:
        async with started(subject) as engine:
            alone = [await engine.generate([5, 6], SHORT._replace(seed=seed)) for seed in (1, 2)]
            crowd = await asyncio.gather(
                *[engine.generate([5 + i % 3, 6], SHORT._replace(seed=i)) for i in range(9)]
            )
            together = await asyncio.gather(
                *[engine.generate([5, 6], SHORT._replace(seed=seed)) for seed in (1, 2)]
            )
            assert [tokens_of(c) for c in alone] == [tokens_of(c) for c in together]
            assert tokens_of(alone[0]) != tokens_of(alone[1])
            assert len({tuple(tokens_of(c)) for c in crowd}) == 9

    run(scenario())


def test_greedy_is_deterministic(subject: Subject) -> None:
    async def scenario() -> None:
        async with started(subject) as engine:
            greedy = SamplingParams(max_tokens=12, temperature=0.0, seed=3)
            first, second = [await engine.generate([5, 6, 7], greedy) for _ in range(2)]
            assert tokens_of(first) == tokens_of(second)
            assert_whole(first)

    run(scenario())


def test_stats_grow(subject: Subject) -> None:
    async def scenario() -> None:
        async with started(subject) as engine:
            assert engine.stats()[:3] == (0.0, 0.0, 0)
            await engine.generate([5], SHORT)
            after = engine.stats()
            assert after.generated_tokens == SHORT.max_tokens
            assert after.busy_s > 0
            assert after.paused_s == 0
            assert (after.running, after.waiting) == (0, 0)
            await engine.pause("in_place")
            await until(lambda: engine.stats().paused_s > 0)
            await engine.resume()
            paused_s = engine.stats().paused_s
            await engine.generate([5], SHORT)
            assert engine.stats().paused_s == paused_s
            assert engine.stats().busy_s > after.busy_s

    run(scenario())


def test_close_ends_every_call(subject: Subject) -> None:
    async def scenario() -> None:
        async with started(subject) as engine:
            running = asyncio.create_task(engine.generate([5], SamplingParams(4000, 1.0, 0)))
            await until(lambda: engine.stats().running == 1)
            unsent = asyncio.create_task(engine.generate([5], SHORT))
            await asyncio.sleep(0)
            await engine.close()
            for task in (running, unsent):
                with pytest.raises(GenerationFailed, match="closed"):
                    await task
            with pytest.raises(GenerationFailed, match="closed"):
                await engine.generate([5], SHORT)
            assert engine.version is None
            await engine.close()

    run(scenario())


def test_close_without_start_is_harmless(subject: Subject) -> None:
    async def scenario() -> None:
        engine = subject.make()
        assert engine.version is None
        await engine.close()

    run(scenario())
