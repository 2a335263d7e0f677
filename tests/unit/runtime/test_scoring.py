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
from tests.helpers.actors import RecordingLog
from tests.helpers.config import small_config
from tests.helpers.rewards import Guessing

from ratchet.errors import RewardFailed
from ratchet.runtime import scoring
from ratchet.runtime.scoring import ThreadScorer
from ratchet.tasks.base import Conversation, Split, Step
from ratchet.types import Prompt

PROMPT = Prompt("p7", "1>")
REWARD = "module:reward"


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


class Odd(float):
    def __float__(self) -> float:
        raise RuntimeError("no number after all")


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "None, not a number"),
        ("1.0", "'1.0', not a number"),
        ([1.0], "not a number"),
        (1j, "not a number"),
        (np.ones(2), "not a number"),
        ("9" * 10_000, "'9+\\.\\.\\.9+', not a number"),
        (math.nan, "nan, which is not finite"),
        (-math.inf, "-inf, which is not finite"),
        (Mute(), "<Mute instance at .*>, not a number"),
        (10**400, "too large for a float"),
        (Odd(1.0), "breaks when it is made one: no number after all"),
    ],
    ids=range(11),
)
def test_anything_else_is_a_failure_that_names_prompt_and_value(value: Any, words: str) -> None:
    with pytest.raises(RewardFailed, match=f"p7 is .*{words}") as failed:
        score(lambda *_: value)
    assert failed.value.reason == "reward_invalid"
    assert len(str(failed.value)) < 200


def raises(error: BaseException) -> Callable[[Prompt, str], float]:
    def reward(prompt: Prompt, completion: str) -> float:
        raise error

    return reward


@pytest.mark.parametrize(
    ("error", "reason", "words"),
    [
        (ValueError("cannot judge"), "raised", "raised ValueError: cannot judge"),
        (TimeoutError("slow"), "raised", "raised TimeoutError: slow"),
        (StopIteration(), "raised", "raised StopIteration"),
        (asyncio.CancelledError(), "raised", "raised CancelledError"),
        (KeyboardInterrupt(), "raised", "raised KeyboardInterrupt"),
        (RewardFailed("no answer"), "raised", "raised RewardFailed: no answer"),
        (SystemExit(3), "exited", "exited: SystemExit: 3"),
        (MemoryError(), "memory", "ran out of memory"),
    ],
)
def test_a_reward_that_raises_or_exits_is_a_failure(
    error: BaseException, reason: str, words: str
) -> None:
    with pytest.raises(RewardFailed, match=f"reward of prompt p7 {words}") as failed:
        score(raises(error))
    assert failed.value.reason == f"reward_{reason}"


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


@pytest.mark.parametrize(
    ("task", "in_process", "processes"),
    [
        ({"name": "copy"}, False, False),
        ({"name": "copy", "reward": REWARD}, False, True),
        ({"name": "copy", "reward": REWARD}, True, False),
        ({"name": "copy", "reward": REWARD, "reward_isolation": "thread"}, False, False),
        ({"name": "copy", "reward_isolation": "process"}, False, True),
        ({"name": "copy", "reward_isolation": "process"}, True, True),
        ({"name": "jsonl", "args": {"path": "x"}}, False, False),
        ({"name": "jsonl", "args": {"path": "x", "score": "math"}}, False, True),
        ({"name": "reasoning-gym"}, False, True),
        ({"name": "module:Task"}, False, True),
        ({"tasks": [{"name": "copy"}, {"name": "jsonl"}]}, False, False),
        ({"tasks": [{"name": "copy"}, {"name": "jsonl", "reward": REWARD}]}, False, True),
    ],
)
def test_code_that_is_not_ours_runs_in_processes(
    task: dict[str, Any], in_process: bool, processes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "ProcessScorer", lambda *_, **__: None)
    copy = {"name": "mixture", "args": {}}
    config = small_config(task=copy | task)
    own = Task(lambda *_: 1.0)
    scorer = scoring.open_scorer(config, own, in_process=in_process, log=RecordingLog())
    assert (scorer is None) is processes
    assert processes or isinstance(scorer, ThreadScorer)


def test_the_environment_of_a_task_of_several_turns_is_held_to_its_protocol() -> None:
    prompt, talk = Prompt("train0", "train0"), Conversation(("a",), state=1)

    async def main() -> None:
        with contextlib.closing(ThreadScorer(Guessing())) as scorer:
            assert scorer.max_turns(prompt) == 3
            assert await scorer.step(prompt, talk) == Step("more", 2)
            assert await scorer.score_conversations(prompt, [talk]) == [1.0]
            with pytest.raises(RewardFailed, match="train0 returned None, not a Step") as failed:
                await scorer.step(prompt, Conversation(("nothing",)))
            assert failed.value.reason == "reward_invalid"

    asyncio.run(main())
    assert ThreadScorer(Task(lambda *_: 1.0)).max_turns(prompt) == 1
