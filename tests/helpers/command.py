"""The `ratchet` command as a user runs it: a process of its own, with children."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from ratchet.config import Config


class Command:
    """A running `ratchet run`, its children and its files."""

    def __init__(self, config: Config | None, directory: Path, *args: str) -> None:
        """Run a configuration in a new directory; None goes on with the run in it."""
        self.directory = directory
        if config is None:
            arguments = ["resume", str(directory), *args]
        else:
            recipe = directory.with_suffix(".toml")
            recipe.write_text(config.to_toml())
            arguments = ["run", str(recipe), "--dir", str(directory), *args]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ratchet.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def until(self, what: str, happened: Callable[[], Any], *, within_s: float = 90.0) -> Any:
        """Poll until something is true of the files or processes of the run; return it."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if value := happened():
                return value
            if self.process.poll() is not None:
                raise AssertionError(f"ended before {what}:\n{self.process.stdout.read()}")
            time.sleep(0.05)  # nothing tells another process's files: there is no event to await
        raise AssertionError(f"no {what} within {within_s} s")

    def steps(self) -> list[dict[str, Any]]:
        """The lines of metrics so far."""
        return json_lines(self.directory / "metrics.jsonl")

    def events(self, role: str, event: str) -> list[dict[str, Any]]:
        """The log events of one role so far."""
        lines = json_lines(self.directory / "logs" / f"{role}.jsonl")
        return [line for line in lines if line["event"] == event]

    def child(self, name: str) -> int:
        """The pid of the newest process of a role."""
        started = [e for e in self.events("launcher-0", "process_started") if e["name"] == name]
        return int(started[-1]["pid"])

    def family(self) -> list[psutil.Process]:
        """The command and all its descendants."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def finish(self, within_s: float = 120.0) -> tuple[int, str]:
        """Wait for the end; return exit code and output."""
        output, _ = self.process.communicate(timeout=within_s)
        return self.process.returncode, output

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            for process in self.family():
                process.kill()
            self.process.communicate()


def descendants() -> list[psutil.Process]:
    """What the test's own process has started, but for the helpers that multiprocessing keeps."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "multiprocessing" not in " ".join(_command_of(child))]


def _command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def gone(processes: Sequence[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Wait for processes to end; return those that did not."""
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process that the test started."""
    os.kill(pid, number)


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file that may still grow."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
