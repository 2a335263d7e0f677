"""The loop that supervises a run does not stand still because nobody reads what it shows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import IO, Any

import pytest

from ratchet.cli_foreground import in_foreground

SCRIPT = """
import asyncio, sys, threading
from ratchet.cli_foreground import in_foreground

class Viewer:
    def __init__(self):
        self.stopped = threading.Event()

    def follow(self):
        sys.stderr.write("follows\\n")
        while True:
            print("x" * 99, flush=True)
            if self.stopped.wait(0.01):
                return

    def stop(self):
        self.stopped.set()

interrupted = asyncio.Event()

async def work():
    await interrupted.wait()
    sys.stderr.write("stopped in order\\n")
    return 7

result, code = in_foreground(work, interrupted.set, Viewer())
sys.stderr.write(f"result {result}\\n")
raise SystemExit(code)
"""


def command(stdout: int | IO[Any]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=stdout, stderr=subprocess.PIPE, text=True
    )


def until(process: subprocess.Popen[str], word: str) -> None:
    assert process.stderr is not None
    assert process.stderr.readline() == f"{word}\n"


def test_a_signal_ends_it_although_nobody_reads() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write_end, b"x" * 65536)
    os.set_blocking(write_end, True)
    with command(write_end) as process:
        until(process, "follows")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    os.close(read_end)
    os.close(write_end)
    assert (process.returncode, errors) == (128 + signal.SIGTERM, "stopped in order\n")


def test_it_goes_on_when_its_output_is_closed() -> None:
    with command(subprocess.PIPE) as process:
        until(process, "follows")
        assert process.stdout is not None
        process.stdout.close()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert errors.startswith("stopped in order\nresult 7\n")


class Shown:
    """A viewer that ends at once."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[str] = []
        self._error = error

    def follow(self) -> None:
        self.calls.append("follow")
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self.calls.append("stop")


def foreground(viewer: Any, work: Callable[[], Any]) -> Any:
    return in_foreground(work, lambda: None, viewer)


async def seven() -> int:
    return 7


async def broken() -> int:
    raise OSError("no disk")


def test_a_view_of_work_that_ends() -> None:
    viewer = Shown()
    assert foreground(viewer, seven) == (7, 0)
    assert sorted(viewer.calls) == ["follow", "stop"]


def test_an_error_of_the_view_is_raised_when_the_work_has_ended() -> None:
    with pytest.raises(ValueError, match="damaged"):
        foreground(Shown(ValueError("damaged")), seven)
    with pytest.raises(OSError, match="no disk"):
        foreground(Shown(ValueError("damaged")), broken)


def test_the_signal_handlers_are_gone_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    foreground(Shown(), seven)
    assert signal.getsignal(signal.SIGTERM) is before
    assert asyncio.run(seven()) == 7
