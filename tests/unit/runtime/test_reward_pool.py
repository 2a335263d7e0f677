"""Groups take their turns with the processes of a scorer, which are real ones."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.reward_scorers import FILE, fails, prompt, scoring, until

from ratchet.errors import RewardFailed, TaskError
from ratchet.runtime import reward_pool
from ratchet.runtime.reward_link import StartFailed
from ratchet.runtime.reward_pool import reward_environment
from ratchet.tasks.base import Conversation, Step
from ratchet.types import Prompt


def test_other_groups_do_not_notice(tmp_path: Path) -> None:
    async def main() -> None:
        async with scoring(reward_workers=2, reward_timeout_s=1.0) as scorer:
            bad = [asyncio.ensure_future(fails(scorer, word)) for word in ("loop", "_exit", "loop")]
            good = [scorer.score(prompt("number"), [str(n)]) for n in range(20)]
            assert await asyncio.gather(*good) == [[float(n)] for n in range(20)]
            reasons = [error.reason for error in await asyncio.gather(*bad)]
            assert reasons == ["reward_timeout", "reward_exited", "reward_timeout"]

    asyncio.run(main())


def test_a_cancelled_group_frees_its_process(tmp_path: Path) -> None:
    async def main() -> None:
        async with scoring() as scorer:
            entered = tmp_path / "entered"
            looping = asyncio.ensure_future(scorer.score(prompt("loop"), [str(entered)]))
            waiting = asyncio.ensure_future(scorer.score(prompt("number"), ["1"]))
            await until(entered.exists)
            waiting.cancel()  # one that has no process yet holds none
            looping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await looping
            assert await scorer.score(prompt("number"), ["2"]) == [2.0]

    asyncio.run(main())


def test_who_comes_first_is_served_first() -> None:
    async def main() -> None:
        served: list[int] = []

        async def group(number: int) -> None:
            await scorer.score(prompt("number"), ["1"])
            served.append(number)

        async with scoring() as scorer:
            await asyncio.gather(*(group(number) for number in range(30)))
        assert served == list(range(30))

    asyncio.run(main())


def test_a_variable_that_is_not_set_is_named() -> None:
    with pytest.raises(TaskError, match=r"task.reward_env names 'JUDGE_KEY', which is not set"):
        reward_environment({"PATH": "/bin"}, ["JUDGE_KEY"])


def test_a_task_that_does_not_build_in_a_process_is_the_users_to_mend() -> None:
    async def main() -> None:
        name = f"{FILE}:Unbuildable"
        async with scoring(name=name, args={}, reward=None) as scorer:
            for _ in range(2):
                with pytest.raises(
                    TaskError,
                    match=r"Unbuildable' failed to build: .* abandoned .*reward_env = \[\]",
                ):
                    await scorer.score(prompt("number"), ["1"])

    asyncio.run(main())


def test_a_later_start_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = iter([None, StartFailed("flaky"), OSError("none to be had"), None])

    class Process:
        clean = False
        pid = 1

        def __init__(self, *_: Any) -> None:
            pass

        async def start(self) -> None:
            failure = next(starts)
            if failure is not None:
                raise failure
            self.clean = True

        async def score(self, *_: Any) -> list[float]:
            self.clean = False
            return [1.0]

        def kill(self) -> None:
            pass

        async def end(self) -> None:
            pass

    monkeypatch.setattr(reward_pool, "RewardProcess", Process)
    monkeypatch.setattr(reward_pool, "_FIRST_PAUSE_S", 0.001)

    async def main() -> None:
        async with scoring() as scorer:
            assert await scorer.score(prompt("number"), ["1"]) == [1.0]
            assert await scorer.score(prompt("number"), ["1"]) == [1.0]
        assert next(starts, "all used") == "all used"

    asyncio.run(main())


def test_a_closed_scorer_begins_nothing_and_leaves_nothing() -> None:
    async def main() -> None:
        async with scoring(reward_timeout_s=0.5) as scorer:
            busy = asyncio.ensure_future(fails(scorer, "loop"))
            waiting = [asyncio.ensure_future(scorer.score(prompt("pid"), ["1"])) for _ in range(2)]
            await asyncio.sleep(0)
            scorer.close()
            scorer.close()
            for late in waiting:
                with pytest.raises(RuntimeError, match="closed"):
                    await late
            with contextlib.suppress(RuntimeError):
                await busy  # whether its process was there in time or not, it ends

    asyncio.run(main())


def test_an_environment_takes_its_turns_there() -> None:
    async def main() -> None:
        async with scoring(name=f"{FILE}:Guessing", args={}, reward=None) as scorer:
            task_prompt = Prompt("train0", "train0")
            assert scorer.max_turns(task_prompt) == 3
            talk = Conversation(("a", "b"), ("more",), state=1)
            assert await scorer.step(task_prompt, talk) == Step("more", 2)
            assert await scorer.score_conversations(task_prompt, [talk, talk]) == [1.0, 1.0]
            for turn in ("nothing", "unsendable"):
                with pytest.raises(RewardFailed) as failed:
                    await scorer.step(task_prompt, Conversation((turn,)))
                assert failed.value.reason == "reward_invalid"

    asyncio.run(main())
