"""What every rollout engine promises of calls, run on each of them; on SGLang's in tests/sglang."""

from __future__ import annotations

import asyncio

import pytest
from tests.helpers.rollout_engines import (
    SHORT,
    Subject,
    assert_whole,
    run,
    started,
    tokens_of,
    until,
)

from ratchet.backends.rollout.base import SamplingParams
from ratchet.errors import GenerationFailed, PromptTooLong


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
