from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.helpers.actors import RecordingLog
from tests.helpers.config import small_config
from tests.simulation.loop import run_virtual

from ratchet.actors.evaluation_share import EvaluationShares
from ratchet.errors import GenerationFailed, VersionError
from ratchet.messages import EvaluatePolicy, PolicyEvaluated
from ratchet.types import Prompt

TIMEOUT_S = 10.0
REQUEST = EvaluatePolicy(3, first=1, count=2, samples=1, temperature=0.0)
Answer = Callable[[], Awaitable[float]]


class Generator:
    """Answers by script: one call for each prompt."""

    def __init__(self, **answers: Answer) -> None:
        self.answers = answers
        self.config = small_config()
        self.cancelled: list[str] = []

    async def evaluate(self, prompt: Prompt, request: EvaluatePolicy) -> float:
        assert request == REQUEST
        try:
            return await self.answers[prompt.prompt_id]()
        except asyncio.CancelledError:
            self.cancelled.append(prompt.prompt_id)
            raise


def after(seconds: float, outcome: float | Exception) -> Answer:
    async def answer() -> float:
        await asyncio.sleep(seconds)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return answer


def shares(generator: Generator, log: RecordingLog | None = None) -> EvaluationShares:
    prompts = [Prompt(f"e{i}", "1>") for i in range(4)]
    double: Any = generator
    return EvaluationShares(double, prompts, timeout_s=TIMEOUT_S, log=log or RecordingLog())


def test_what_fails_or_hangs_is_none_and_never_zero() -> None:
    async def main() -> None:
        log = RecordingLog()
        generator = Generator(e1=after(99.0, 1.0), e2=after(0.0, GenerationFailed("no")))
        running = shares(generator, log)
        began = asyncio.get_running_loop().time()
        assert await running.run(REQUEST, 3) == PolicyEvaluated(3, (None, None))
        assert asyncio.get_running_loop().time() - began == pytest.approx(TIMEOUT_S)
        assert not running.running
        assert generator.cancelled == ["e1"]  # it is out of the engine
        assert [(e["prompt"], e["detail"]) for e in log.named("evaluation_failed")] == [
            ("e2", "no"), ("e1", "not done within 10.0 s (eval.timeout_s)"),
        ]  # fmt: skip

    run_virtual(main())


def test_a_part_that_is_done_in_time_counts() -> None:
    async def main() -> None:
        running = shares(Generator(e1=after(99.0, 1.0), e2=after(9.0, 0.25)))
        assert await running.run(REQUEST, 3) == PolicyEvaluated(3, (None, 0.25))

    run_virtual(main())


def test_an_offer_of_another_version_ends_it_at_once_and_one_of_its_own_does_not() -> None:
    async def main() -> None:
        generator = Generator(e1=after(5.0, 1.0), e2=after(1.0, 0.5))
        running = shares(generator)
        work = asyncio.ensure_future(running.run(REQUEST, 3))
        await asyncio.sleep(2.0)
        running.supersede(3)
        await asyncio.sleep(1.0)
        assert running.running
        running.supersede(4)
        running.supersede(4)  # sent again before the end of the first
        began = asyncio.get_running_loop().time()
        with pytest.raises(VersionError, match="version 4 was sent while version 3 was evaluated"):
            await work
        assert asyncio.get_running_loop().time() == began
        assert not running.running
        assert generator.cancelled == ["e1"]

    run_virtual(main())


def test_a_token_of_another_version_ends_it_without_a_result() -> None:
    async def main() -> None:
        mixed = VersionError("got tokens of 4")
        generator = Generator(e1=after(5.0, 1.0), e2=after(1.0, mixed))
        running = shares(generator)
        with pytest.raises(VersionError, match="got tokens of 4"):
            await running.run(REQUEST, 3)
        assert generator.cancelled == ["e1"]
        with pytest.raises(VersionError, match="holds version None, not 3"):
            await running.run(REQUEST, None)

    run_virtual(main())


def test_of_several_tasks_each_prompt_says_its_own() -> None:
    async def main() -> None:
        generator = Generator(**{"a/1": after(1.0, 0.5), "b/1": after(1.0, 1.0)})
        part = {"name": "copy", "args": {"digits": 3}}
        tasks = [part | {"label": "a"}, part | {"label": "b"}]
        generator.config = small_config(task={"name": "mixture", "tasks": tasks, "args": {}})
        double: Any = generator
        prompts = [Prompt(name, "1>") for name in ("a/0", "a/1", "b/1")]
        running = EvaluationShares(double, prompts, timeout_s=None, log=RecordingLog())
        assert await running.run(REQUEST, 3) == PolicyEvaluated(3, (0.5, 1.0), ("a", "b"))

    run_virtual(main())
