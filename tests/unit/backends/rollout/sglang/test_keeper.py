"""What a keeper writes down of its server's output."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import psutil

from ratchet.backends.rollout.sglang.keeper import Log


def test_a_key_that_is_a_part_of_another_leaves_nothing_of_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("ab", buffering=0) as file:
        log = Log(file, ["a" * 16, "a" * 16 + "-the-rest"])
        log.take(io.BytesIO(b"api_key='" + b"a" * 16 + b"-the-rest', other='" + b"a" * 16 + b"'"))
        log.close()
    assert path.read_text() == "api_key='***', other='***'"


KEEPER = """
import os, pathlib, sys, time

from ratchet.backends.rollout.sglang import keeper

def fails(pid):
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.01)
    raise OSError(38, "Function not implemented")

os.pidfd_open = fails
keeper.main()
"""


def test_a_keeper_that_fails_leaves_nothing_of_what_it_has_started(tmp_path: Path) -> None:
    there = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {there}.new; mv {there}.new {there}; wait"
    task = {"argv": ["sh", "-c", script], "config": {}, "log": str(tmp_path / "log")}
    with subprocess.Popen(
        [sys.executable, "-c", KEEPER, str(there)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        keeper.stdin.write(json.dumps(task).encode() + b"\n")
        keeper.stdin.flush()
        said = json.loads(keeper.stdout.readline())
    assert "not implemented" in said["error"]
    assert not psutil.pid_exists(int(there.read_text()))
