"""Real processes throughout: what is tested is what the kernel does with them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.helpers import rewards
from tests.helpers.actors import RecordingLog
from tests.helpers.config import small_config

from ratchet.errors import RewardFailed, TaskError
from ratchet.runtime import reward_pool
from ratchet.runtime.reward_link import StartFailed
from ratchet.runtime.reward_pool import ProcessScorer, reward_environment
from ratchet.subreaper import children
from ratchet.tasks.base import Conversation, Step
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


def test_what_a_reward_does_wrong_is_told_and_its_process_stays() -> None:
    async def main() -> None:
        async with scoring() as scorer:
            assert await scorer.score(prompt("number"), ["3", "1", "2"]) == [3.0, 1.0, 2.0]
            first = await pid(scorer)
            for word, reason, text in (
                ("raise", "reward_raised", "raised ValueError: 1"),
                ("mute", "reward_raised", "raised _MuteError: .*RuntimeError"),
                ("exit", "reward_exited", "exited: SystemExit: 3"),
                ("none", "reward_invalid", "None, not a number"),
                ("string", "reward_invalid", "'1.0', not a number"),
                ("nan", "reward_invalid", "nan, which is not finite"),
                ("inf", "reward_invalid", "inf, which is not finite"),
                ("huge", "reward_invalid", "too large for a float"),
            ):
                error = await fails(scorer, word)
                assert error.reason == reason
                assert error.args[0].startswith("the reward of prompt p7 ")
                with pytest.raises(RewardFailed, match=text):
                    raise error
            assert await pid(scorer) == first

    asyncio.run(main())


def test_a_process_that_a_reward_has_spoiled_is_replaced() -> None:
    async def main() -> None:
        async with scoring(reward_timeout_s=0.3) as scorer:
            last = await pid(scorer)
            for word, reason, text in (
                ("deaf", "reward_timeout", "task.reward_timeout_s = 0.3 s, at answer 1 of 1"),
                ("_exit", "reward_exited", "ended its process: exit code 3"),
                ("killgroup", "reward_exited", "ended its process: signal 9"),
                ("memory", "reward_memory", "ran out of memory"),
                ("fork", "reward_forked", r"forked, and left 1 process\(es\) behind"),
                ("scribble", "reward_exited", "it wrote into its answers"),
            ):
                error = await fails(scorer, word)
                assert (word, error.reason) == (word, reason)
                with pytest.raises(RewardFailed, match=text):
                    raise error
                last, before = await pid(scorer), last
                assert last != before

    asyncio.run(main())


def test_the_time_limit_is_for_each_completion_and_names_the_one_that_took_it() -> None:
    async def main() -> None:
        async with scoring(reward_timeout_s=0.5) as scorer:
            with pytest.raises(RewardFailed, match="at answer 3 of 4"):
                await scorer.score(prompt("loop-at-three"), ["1", "2", "3", "4"])

    asyncio.run(main())


def test_memory_is_that_of_the_process_not_of_one_reward() -> None:
    async def main() -> None:
        async with scoring(reward_max_mib=512) as scorer:
            first = await pid(scorer)
            with pytest.raises(RewardFailed) as failed:
                await scorer.score(prompt("leak"), ["1"] * 8)  # 64 MiB each
            assert failed.value.reason == "reward_memory"
            assert await pid(scorer) != first

    asyncio.run(main())


def test_a_daemon_is_found_and_killed(tmp_path: Path) -> None:
    async def main() -> None:
        async with scoring() as scorer:
            file = tmp_path / "pid"
            error = await fails(scorer, "daemon", str(file))
            assert error.reason == "reward_forked"
            await until_gone(int(file.read_text()))

    asyncio.run(main())


def test_a_program_that_a_reward_has_started_serves_it_until_its_process_ends() -> None:
    async def main() -> None:
        async with scoring() as scorer:
            (sandbox,) = await scorer.score(prompt("sandbox"), ["1"])
            assert await scorer.score(prompt("run"), ["1"]) == [0.0]
            assert await scorer.score(prompt("fork-and-wait"), ["1"]) == [7.0]
            assert await scorer.score(prompt("sandbox"), ["1"]) == [sandbox]
        await until_gone(int(sandbox))

    asyncio.run(main())


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


def test_a_reward_knows_no_secret_and_holds_no_file_of_the_worker(
    capfd: pytest.CaptureFixture[str],
) -> None:
    environ = {**os.environ, "API_KEY": "secret", "OTHER_KEY": "secret", "LC_ALL": "C"}

    async def main() -> None:
        with socket_pair() as held:
            assert held
            async with scoring(environ, reward_env=["OTHER_KEY"]) as scorer:
                names = ["API_KEY", "OTHER_KEY", "LC_ALL", "PATH", "HOME"]
                known = await scorer.score(prompt("env"), names)
                assert known == [0.0, 1.0, 1.0, 1.0, 1.0]
                assert await scorer.score(prompt("descriptors"), ["1"]) == [4.0]  # and the wire
                assert await scorer.score(prompt("cores"), ["1"]) == [0.0]
                assert await scorer.score(prompt("stdin"), ["1"]) == [0.0]
                assert await scorer.score(prompt("print"), ["words"]) == [1.0]

    asyncio.run(main())
    assert capfd.readouterr() == ("", "words\nwords-of-a-shell\n")


@contextlib.contextmanager
def socket_pair() -> Any:
    """Descriptors that a child would inherit if nothing closed them."""
    read, write = os.pipe()
    os.set_inheritable(write, True)
    try:
        yield write
    finally:
        os.close(read)
        os.close(write)


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


WORKER = """
import asyncio, os, sys
from ratchet.runtime.reward_pool import ProcessScorer
from ratchet.tasks.registry import build_task
from ratchet.types import Prompt
from tests.helpers.actors import RecordingLog
from tests.helpers.config import small_config

async def main():
    whole = small_config(task={"reward": "tests/helpers/rewards.py:reward", "reward_workers": 1})
    task = build_task(whole.task, 0)
    scorer = ProcessScorer(whole, task, environ=os.environ, log=RecordingLog())
    await scorer.score(Prompt("p", "daemon-loop"), [sys.argv[1]])

asyncio.run(main())
"""


def test_nothing_outlives_a_worker_that_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    root = Path(__file__).parents[3]
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(file)], cwd=root)
    end = time.monotonic() + DEADLINE_S
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < end
        assert worker.poll() is None
        time.sleep(0.01)
    (keeper,) = children(worker.pid)
    scorer = children(keeper)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    for number in (keeper, *scorer, int(file.read_text())):
        asyncio.run(until_gone(number))
