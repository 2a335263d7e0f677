"""A role as a child process: real processes, but small ones that import nothing of ours."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.helpers.actors import RecordingLog
from tests.helpers.command import descendants

from ratchet.actors.restarts import End
from ratchet.runtime import reaper
from ratchet.runtime.child import Reaper, RoleProcess

SAYS = """
import sys
line = sys.stdin.readline()
print(line.strip(), file=sys.stderr)
print('{"status": "failed", "detail": "LedgerError: ' + "x" * 200_000 + '"}', flush=True)
"""

WAITS = """
import sys
for line in sys.stdin:
    pass
"""

PARENT = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "1000"])  # holds our standard output open
if os.fork() == 0:
    os.execvp("sleep", ["sleep", "1000"])
print("children:", child.pid, file=sys.stderr, flush=True)
sys.stdin.readline()
sys.stdin.readline()
"""

STUBBORN = """
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ignores it", file=sys.stderr, flush=True)
for line in sys.stdin:
    pass
while True:
    signal.pause()
"""


class Setup:
    """One role process and its reaper."""

    def __init__(self, tmp_path: Path, script: str) -> None:
        self.log = RecordingLog()
        self.errors = tmp_path / "role.err"
        self.reaper = Reaper(self.log)
        self.lives = 0
        self.role = RoleProcess(
            "buffer",
            command=[sys.executable, "-I", "-S", "-c", script],
            env=dict(os.environ),
            first_lines=self._first_lines,
            errors=self.errors,
            reaper=self.reaper,
            log=self.log,
        )

    def _first_lines(self) -> list[bytes]:
        self.lives += 1
        return [b"secret, life %d" % self.lives]

    @property
    def pid(self) -> int:
        return int(self.log.named("process_started")[-1]["pid"])

    async def until_it_says(self, text: str) -> None:
        def said() -> None:
            while text not in self.errors.read_text():  # another process's file: nothing to await
                time.sleep(0.01)

        await asyncio.to_thread(said)


def scenario(tmp_path: Path, script: str, body: Callable[[Setup], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        setup = Setup(tmp_path, script)
        setup.reaper.start()
        async with asyncio.timeout(60):
            try:
                await setup.role.start()
                return await body(setup)
            finally:
                await setup.role.kill()
                await setup.reaper.close()

    return asyncio.run(main())


def until_it_is_a_zombie(pid: int) -> None:
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def family() -> list[psutil.Process]:
    return descendants()


def test_its_last_words_are_its_end_however_long_and_each_life_has_its_own_spec(
    tmp_path: Path,
) -> None:
    async def body(setup: Setup) -> End:
        first = setup.pid
        await setup.role.ended()
        await setup.role.start()
        assert setup.pid != first
        assert "secret" not in " ".join(psutil.Process(setup.pid).cmdline())
        end = await setup.role.ended()
        assert setup.errors.read_text() == "secret, life 1\nsecret, life 2\n"
        assert "secret" not in str(setup.log.events)
        return end

    end = scenario(tmp_path, SAYS, body)
    assert (end.who, end.kind) == ("buffer", "abnormal")
    assert end.reason == "buffer: LedgerError: " + "x" * 200_000
    assert family() == []


@pytest.mark.parametrize(
    ("script", "number", "how"),
    [(WAITS, signal.SIGKILL, "signal 9"), ("raise SystemExit(3)", None, "exit code 3")],
)
def test_who_says_nothing_is_told_by_how_it_died(
    tmp_path: Path, script: str, number: int | None, how: str
) -> None:
    async def body(setup: Setup) -> End:
        if number is not None:
            os.kill(setup.pid, number)
        return await setup.role.ended()

    end = scenario(tmp_path, script, body)
    assert end.kind == "abnormal"
    assert end.reason == f"buffer died of {how}; see {tmp_path}/role.err"


def test_its_last_words_are_read_also_if_its_end_is_seen_first(tmp_path: Path) -> None:
    async def body(setup: Setup) -> End:
        life = setup.role._life
        assert life is not None
        asyncio.get_running_loop().remove_reader(life._stdout.fileno())
        return await setup.role.ended()

    script = SAYS.replace("200_000", "20_000")  # less than a pipe holds
    assert scenario(tmp_path, script, body).reason.endswith("x" * 20_000)


def test_what_it_has_started_ends_with_it_also_if_that_holds_its_output_open(
    tmp_path: Path,
) -> None:
    async def body(setup: Setup) -> list[psutil.Process]:
        await setup.until_it_says("children:")
        grandchildren = psutil.Process(setup.pid).children()
        assert len(grandchildren) == 2
        os.kill(setup.pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            await setup.role.ended()
        return grandchildren

    _, alive = psutil.wait_procs(scenario(tmp_path, PARENT, body), timeout=5)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


def test_a_stop_is_a_signal_and_a_kill_ends_who_ignores_it(tmp_path: Path) -> None:
    async def body(setup: Setup) -> End:
        await setup.until_it_says("ignores it")
        stopping = asyncio.ensure_future(setup.role.stop())
        done, _ = await asyncio.wait([stopping], timeout=0.2)
        assert not done
        await setup.role.kill()
        await stopping
        await setup.role.stop()  # it has ended: at once
        return await setup.role.ended()

    assert "signal 9" in scenario(tmp_path, STUBBORN, body).reason


def test_a_process_that_was_stopped_is_killed_as_well(tmp_path: Path) -> None:
    async def body(setup: Setup) -> End:
        os.kill(setup.pid, signal.SIGSTOP)
        await setup.role.kill()
        return await setup.role.ended()

    assert "signal 9" in scenario(tmp_path, WAITS, body).reason


def test_a_line_to_one_that_has_ended_is_lost(tmp_path: Path) -> None:
    async def body(setup: Setup) -> None:
        os.kill(setup.pid, signal.SIGKILL)
        await setup.role.ended()
        setup.role.tell(b"stop")

    scenario(tmp_path, WAITS, body)


def test_a_lost_reaper_is_told_and_keeps_nobody(tmp_path: Path) -> None:
    async def body(setup: Setup) -> None:
        process = setup.reaper._process
        assert process is not None
        process.kill()
        until_it_is_a_zombie(process.pid)
        os.kill(setup.pid, signal.SIGKILL)
        await setup.role.ended()
        assert len(setup.log.named("reaper_lost")) == 1

    scenario(tmp_path, WAITS, body)


# --- the reaper as a program

GROUP = """
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "1000"])
print("ready", flush=True)
signal.pause()
"""


def test_it_kills_the_groups_that_are_left_and_no_others() -> None:
    groups = [
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GROUP],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        for _ in range(2)
    ]
    watch = subprocess.Popen([sys.executable, "-I", "-S", reaper.__file__], stdin=subprocess.PIPE)
    assert watch.stdin is not None
    try:
        for group in groups:
            assert group.stdout is not None
            assert group.stdout.readline() == b"ready\n"
        left, gone = groups
        (grandchild,) = psutil.Process(left.pid).children()
        watch.stdin.write(b"+%d\n+%d\n-%d\n" % (left.pid, gone.pid, gone.pid))
        watch.stdin.flush()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            _until_it_ignores(watch.pid, number)
            watch.send_signal(number)
        os.kill(left.pid, signal.SIGSTOP)  # a stopped one too
        watch.stdin.close()
        assert watch.wait(10) == 0
        assert left.wait(10) == -signal.SIGKILL
        psutil.wait_procs([grandchild], timeout=10)
        assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE
        assert gone.poll() is None
    finally:
        for process in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        watch.kill()
        watch.wait()


def _until_it_ignores(pid: int, number: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        ignored = Path(f"/proc/{pid}/status").read_text().split("SigIgn:\t")[1].split()[0]
        if int(ignored, 16) & 1 << (number - 1):
            return
        time.sleep(0.01)  # another process's state: there is no event to await
    raise AssertionError(f"the reaper does not ignore signal {number}")
