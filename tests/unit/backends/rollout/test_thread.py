from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from ratchet.backends.rollout._thread import StepThread
from ratchet.errors import GenerationFailed, WeightsMismatch


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test

    asyncio.run(bounded())


class Steps:
    """A thread whose steps wait for the test, and are written down."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.ends: list[str] = []
        self.work = 0
        self.error: Exception | None = None
        self.stepping, self.go_on = threading.Event(), threading.Event()
        self.thread = StepThread(
            step=self.step,
            can_step=lambda: self.work > 0,
            ended=lambda reason: self.ends.append(str(reason)),
        )

    def step(self) -> None:
        self.stepping.set()
        assert self.go_on.wait(10)
        if self.error is not None:
            raise self.error
        self.work -= 1
        self.log.append("step")

    def do(self, name: str, work: int = 0) -> None:
        self.log.append(name)
        self.work += work


def test_commands_run_in_order_between_two_steps() -> None:
    async def scenario() -> None:
        steps = Steps()
        steps.thread.start()
        await steps.thread.call(lambda: steps.do("first", work=3))
        await asyncio.to_thread(steps.stepping.wait)
        for name in "ab":
            steps.thread.put(lambda name=name: steps.do(name))  # type: ignore[misc]
        steps.go_on.set()
        await steps.thread.call(lambda: steps.do("c"))
        await steps.thread.stop()
        assert steps.log[:5] == ["first", "step", "a", "b", "c"]
        assert steps.ends == ["the engine was closed"]

    run(scenario())


def test_a_commands_own_error_is_its_callers_alone() -> None:
    def refuse() -> None:
        msg = "not mine"
        raise WeightsMismatch(msg)

    async def scenario() -> None:
        steps = Steps()
        steps.thread.start()
        with pytest.raises(WeightsMismatch, match="not mine"):
            await steps.thread.call(refuse)
        assert await steps.thread.call(lambda: 5) == 5
        await steps.thread.stop()

    run(scenario())


def test_a_step_that_raises_fails_the_calls_that_wait_and_those_to_come() -> None:
    async def scenario() -> None:
        steps = Steps()
        steps.thread.start()
        await steps.thread.call(lambda: steps.do("first", work=1))
        await asyncio.to_thread(steps.stepping.wait)
        waiting = [asyncio.create_task(steps.thread.call(lambda: None)) for _ in range(2)]
        broken = asyncio.create_task(steps.thread.broken())
        await asyncio.sleep(0)
        steps.error = ZeroDivisionError("by nothing")
        steps.go_on.set()
        for call in (*waiting, steps.thread.call(lambda: None)):
            with pytest.raises(GenerationFailed, match="ZeroDivisionError: by nothing"):
                await call
        assert steps.thread.has_ended
        assert steps.ends == ["the engine broke: ZeroDivisionError: by nothing"]
        assert await broken == steps.ends[0]
        await steps.thread.stop()
        assert len(steps.ends) == 1

    run(scenario())


def test_without_start_nothing_runs() -> None:
    async def scenario() -> None:
        steps = Steps()
        with pytest.raises(GenerationFailed, match="not started"):
            await steps.thread.call(lambda: None)
        await steps.thread.stop()
        assert not steps.ends

    run(scenario())
