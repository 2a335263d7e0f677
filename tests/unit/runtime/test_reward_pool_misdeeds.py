"""What rewards do wrong in their processes, and what is left of it. The processes are real."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.reward_scorers import DEADLINE_S, fails, pid, prompt, scoring, until_gone

from ratchet.errors import RewardFailed
from ratchet.subreaper import children


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
