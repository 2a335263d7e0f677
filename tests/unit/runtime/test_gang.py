import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ratchet.runtime.gang import Death, LastWords, RankFiles, first_cause
from ratchet.runtime.role import RoleOutcome

ERR = "/run/logs/trainer-0.err"

RANK = """
import sys, time
from pathlib import Path
from ratchet.runtime.gang import RankFiles
from ratchet.runtime.role import RoleOutcome
files = RankFiles(Path(sys.argv[1]), 0)
files.become_stdin()
for line in sys.stdin.buffer:
    if line == b"end\\n":
        files.say(RoleOutcome("stopped", "as told"))
        break
    sys.stdout.write(line.decode())
    sys.stdout.flush()
    if line == b"work\\n":
        time.sleep(60)
"""
AGENT = """
import sys, time
from pathlib import Path
from ratchet.runtime.gang import RankFiles
files = RankFiles(Path(sys.argv[1]), 0)
files.open()
files.tell(b"work")
sys.stdout.write("open\\n")
sys.stdout.flush()
time.sleep(60)
"""


def python(code: str, folder: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )


def line_of(process: "subprocess.Popen[bytes]") -> bytes:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_rank_reads_lines_and_leaves_last_words(tmp_path: Path) -> None:
    files = RankFiles(tmp_path, 0)
    files.open()
    assert (tmp_path / "0.in").stat().st_mode & 0o777 == 0o600
    assert files.last_words() is None
    files.tell(b"before it was there")
    before = time.monotonic()
    with python(RANK, tmp_path) as rank:
        assert line_of(rank) == b"before it was there"
        files.tell(b"stop")
        assert line_of(rank) == b"stop"
        files.tell(b"end")
        assert rank.wait(20) == 0
    words = files.last_words()
    assert words is not None
    assert words.outcome == RoleOutcome("stopped", "as told")
    assert before < words.at_s < time.monotonic()


@pytest.mark.parametrize("moment", ["while it reads", "before it opens"])
def test_a_rank_ends_with_its_agent_however_that_went(tmp_path: Path, moment: str) -> None:
    folder = tmp_path / "private"
    folder.mkdir()
    with python(AGENT, folder) as agent:
        assert line_of(agent) == b"open"
        if moment == "while it reads":
            with python(RANK, folder) as rank:
                assert line_of(rank) == b"work"
                agent.kill()
                assert rank.wait(5) == 1
        else:
            agent.kill()
            agent.wait()
            with python(RANK, folder) as rank:
                assert line_of(rank) == b""
                assert rank.wait(5) in {0, 1}


def test_no_child_of_the_agent_holds_the_way_to_a_rank_open(tmp_path: Path) -> None:
    files = RankFiles(tmp_path, 0)
    files.open()
    held = [fd for fd in Path("/proc/self/fd").iterdir() if fd.exists()]
    ways = [fd for fd in held if fd.resolve() == tmp_path / "0.in"]
    assert len(ways) == 1
    assert not os.get_inheritable(int(ways[0].name))


def words(status: str, detail: str, at_s: float) -> LastWords:
    return LastWords(RoleOutcome(status, detail), at_s)


LOST = words("failed", "RunFailed: a rank of the trainer was lost", 7.0)


@pytest.mark.parametrize(
    ("deaths", "said", "cause"),
    [
        pytest.param(
            [Death(0, 1), Death(1, -9)],
            {0: LOST},
            RoleOutcome("failed", f"rank 1 of the trainer died of signal 9; see {ERR}"),
            id="who was killed comes before who misses it",
        ),
        pytest.param(
            [Death(0, 1), Death(1, 1)],
            {0: LOST, 1: words("failed", "RunFailed: out of memory", 6.9)},
            RoleOutcome("failed", "rank 1 of the trainer: RunFailed: out of memory"),
            id="the earliest words",
        ),
        pytest.param(
            [Death(1, 1), Death(0, 2)],
            {0: words("user_error", "no such model", 6.0), 1: LOST},
            RoleOutcome("user_error", "no such model"),
            id="rank 0 is the role",
        ),
        pytest.param(
            [Death(1, 2), Death(0, -15)],
            {1: words("user_error", "no such model here", 6.0)},
            RoleOutcome("user_error", "rank 1 of the trainer: no such model here"),
            id="whom the agent ended is no cause",
        ),
        pytest.param(
            [Death(2, 1), Death(0, 1)],
            {2: LOST},
            RoleOutcome("failed", f"rank 2 of the trainer: {LOST.outcome.detail}"),
            id="nor who was told to go and did not come to its end",
        ),
        pytest.param(
            [Death(1, -9)],
            {0: words("stopped", "", 8.0)},
            RoleOutcome("failed", f"rank 1 of the trainer died of signal 9; see {ERR}"),
            id="an orderly end says nothing",
        ),
        pytest.param(
            [Death(3, 1)],
            {},
            RoleOutcome("failed", f"rank 3 of the trainer died of exit code 1; see {ERR}"),
            id="before it could speak",
        ),
    ],
)
def test_the_first_cause(
    deaths: list[Death], said: dict[int, LastWords], cause: RoleOutcome
) -> None:
    assert first_cause(deaths, said, ERR) == cause
