from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from ratchet.backends.rollout.base import RolloutEngine, SamplingParams
from ratchet.backends.rollout.fake import NAME, FakeEngine, fake_token
from ratchet.errors import GenerationFailed

PARAMS = SamplingParams(max_tokens=10, temperature=1.0, seed=3)


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test

    asyncio.run(bounded())


def vector(version: int) -> np.ndarray:
    return np.full(4, version, np.float32)


def test_tokens_prove_the_weights_that_made_them() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        checked: RolloutEngine = engine
        await checked.start()
        await engine.write({NAME: vector(1)})
        await engine.stamp(1)
        task = asyncio.create_task(engine.generate([65, 66], PARAMS))
        while engine.stats().generated_tokens < 4:  # noqa: ASYNC110 - totals, not events
            await asyncio.sleep(0)
        await engine.write({NAME: vector(2)})
        await engine.stamp(2)
        completion = await task
        assert [span.version for span in completion.spans] == [1, 2]
        for span in completion.spans:
            for position in range(span.start, span.end):
                token, logprob = fake_token(vector(span.version), [65, 66], 3, position)
                other, _ = fake_token(vector(3 - span.version), [65, 66], 3, position)
                assert completion.token_ids.numpy()[position] == token != other
                assert completion.logprobs.numpy()[position] == np.float32(logprob)
        await engine.close()

    run(scenario())


def test_the_script_decides_how_long_it_takes_and_whether_it_fails() -> None:
    def delay_s(prompt_ids: Sequence[int], params: SamplingParams) -> float:
        if params.seed == 13:
            msg = "scripted"
            raise GenerationFailed(msg)
        return 0.02 * len(prompt_ids)

    async def scenario() -> None:
        engine = FakeEngine(delay_s=delay_s)
        await engine.start()
        await engine.stamp(0)
        clock = asyncio.get_running_loop().time
        began = clock()
        await asyncio.gather(*[engine.generate([65, 66], PARAMS) for _ in range(5)])
        assert clock() - began >= 0.04
        assert 0.04 <= engine.stats().busy_s <= clock() - began
        with pytest.raises(GenerationFailed, match="scripted"):
            await engine.generate([65], PARAMS._replace(seed=13))
        assert engine.stats().running == engine.stats().waiting == 0
        await engine.close()

    run(scenario())


def test_the_script_decides_where_a_completion_ends_by_itself() -> None:
    async def scenario() -> None:
        engine = FakeEngine(stop_after=lambda prompt_ids, _: len(prompt_ids))
        await engine.start()
        await engine.stamp(0)
        ends = [await engine.generate([65] * length, PARAMS) for length in (1, 9, 10, 11)]
        assert [len(completion.token_ids) for completion in ends] == [1, 9, 10, 10]
        reasons = [completion.finish_reason for completion in ends]
        assert reasons == ["stop", "stop", "length", "length"]
        await engine.close()

    run(scenario())


def test_a_close_fails_what_is_in_flight_in_the_order_of_its_start() -> None:
    async def scenario() -> None:
        engine = FakeEngine(delay_s=lambda *_: 60.0)
        await engine.start()
        await engine.stamp(0)
        failed: list[int] = []

        async def generate(number: int) -> None:
            with pytest.raises(GenerationFailed, match="closed"):
                await engine.generate([number], PARAMS)
            failed.append(number)

        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(generate(number))
            await asyncio.sleep(0)
            await engine.close()
        assert failed == list(range(20))

    run(scenario())


def test_it_needs_no_torch() -> None:
    script = """
import asyncio, sys
from ratchet.backends.rollout.fake import FakeEngine, SamplingParams
async def main():
    engine = FakeEngine()
    await engine.start()
    await engine.stamp(0)
    await engine.generate([1], SamplingParams(3, 1.0, 0))
    await engine.close()
asyncio.run(main())
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
