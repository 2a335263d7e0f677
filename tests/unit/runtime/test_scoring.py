from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ratchet.errors import RewardFailed
from ratchet.runtime.scoring import ThreadScorer
from ratchet.tasks.base import Split
from ratchet.types import Prompt

PROMPT = Prompt("p7", "1>")


class Task:
    def __init__(self, score: Callable[[Prompt, str], Any]) -> None:
        self._score = score

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return [PROMPT]

    def score(self, prompt: Prompt, completion: str) -> Any:
        return self._score(prompt, completion)


def score(reward: Callable[[Prompt, str], Any], *completions: str) -> list[float]:
    with contextlib.closing(ThreadScorer(Task(reward))) as scorer:
        return asyncio.run(scorer.score(PROMPT, completions or ("1",)))


def test_each_completion_has_its_own_reward_in_order() -> None:
    assert score(lambda prompt, text: float(text), "3", "1", "2") == [3.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("value", "reward"), [(True, 1.0), (2, 2.0), (np.float32(0.5), 0.5), (np.int64(3), 3.0)]
)
def test_every_kind_of_real_number_is_a_reward(value: Any, reward: float) -> None:
    (found,) = score(lambda *_: value)
    assert found == reward
    assert type(found) is float


def test_what_is_not_finite_is_for_the_actor_to_judge() -> None:
    assert math.isnan(score(lambda *_: math.nan)[0])
    assert score(lambda *_: math.inf) == [math.inf]


@pytest.mark.parametrize("value", [None, "1.0", [1.0], 1j, np.ones(2)])
def test_anything_else_is_a_failure_that_names_prompt_and_value(value: Any) -> None:
    with pytest.raises(RewardFailed, match=r"p7 is .*, not a number"):
        score(lambda *_: value)


def test_a_number_too_large_is_a_failure_not_the_end() -> None:
    with pytest.raises(RewardFailed, match="p7 is too large"):
        score(lambda *_: 10**400)


def raises(error: BaseException) -> Callable[[Prompt, str], float]:
    def reward(prompt: Prompt, completion: str) -> float:
        raise error

    return reward


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("cannot judge"), "ValueError: cannot judge"),
        (TimeoutError("slow"), "TimeoutError: slow"),
        (StopIteration(), "StopIteration"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_a_reward_that_raises_or_exits_is_a_failure(error: BaseException, words: str) -> None:
    with pytest.raises(RewardFailed, match=f"reward of prompt p7 raised {words}"):
        score(raises(error))


def test_sys_exit_in_a_reward_leaves_the_scorer_usable() -> None:
    async def main() -> None:
        scorer = ThreadScorer(Task(lambda _, text: sys.exit(1) if text == "bad" else 1.0))
        with pytest.raises(RewardFailed):
            await scorer.score(PROMPT, ["good", "bad"])
        assert await scorer.score(PROMPT, ["good"]) == [1.0]
        scorer.close()

    asyncio.run(main())


def test_the_loop_goes_on_while_a_reward_takes_its_time() -> None:
    release, entered = threading.Event(), threading.Event()
    threads: list[str] = []

    def slow(prompt: Prompt, completion: str) -> float:
        threads.append(threading.current_thread().name)
        entered.set()
        assert release.wait(30)
        return 1.0

    async def main() -> list[float]:
        async with asyncio.timeout(30):
            scorer = ThreadScorer(Task(slow))
            scoring = asyncio.ensure_future(scorer.score(PROMPT, ["1"]))
            await asyncio.to_thread(entered.wait, 30)
            assert not scoring.done()  # and yet we are here
            release.set()
            scorer.close()
            return await scoring

    assert asyncio.run(main()) == [1.0]
    assert threads[0].startswith("reward")


def test_a_closed_scorer_ends_its_threads_with_what_they_run() -> None:
    async def main() -> None:
        scorer = ThreadScorer(Task(lambda prompt, text: 1.0))
        await scorer.score(PROMPT, ["1"])
        (thread,) = [t for t in threading.enumerate() if t.name.startswith("reward")]
        scorer.close()
        scorer.close()
        await asyncio.to_thread(thread.join, 30)
        assert not thread.is_alive()

    asyncio.run(main())
