"""`ratchet launch` as a user runs it: one role, a process of its own, with a child."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
from tests.helpers.command import json_lines

from ratchet.config import Config

COMMAND = (sys.executable, "-m", "ratchet.cli")


class Site:
    """What the launches of one test share: a file, a token, a registry, and their end."""

    def __init__(self, root: Path, config: Config) -> None:
        self.root = root
        self.recipe = root / "job.toml"
        self.recipe.write_text(config.to_toml())
        self.token_file = make_token(root / "token")
        self.registry = "127.0.0.1:0"
        self.launched: list[Launched] = []

    def launch(self, role: str, *args: str, name: str | None = None) -> Launched:
        """Start a role in a directory of its own; the first one has to be the registry."""
        launched = Launched(self, role, name or role, args)
        self.launched.append(launched)
        if role == "registry":
            address = launched.until("where it listens", lambda: launched.said("listens at tcp:"))
            self.registry = address.split("tcp:")[1]
        return launched

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        for launched in self.launched:
            launched.kill()


class Launched:
    """A running `ratchet launch`."""

    def __init__(self, site: Site, role: str, name: str, args: tuple[str, ...]) -> None:
        self.role = role
        self.directory = site.root / name
        self._output = site.root / f"{name}.{len(site.launched)}.out"
        options = {
            "--registry": site.registry,
            "--dir": str(self.directory),
            "--token-file": str(site.token_file),
        }
        given = [text for option in options.items() if option[0] not in args for text in option]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [*COMMAND, "launch", role, str(site.recipe), *given, *args],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        """Everything it has printed so far."""
        return self._output.read_text()

    @property
    def last_line(self) -> str:
        """The last line that it has printed so far."""
        return self.output.strip().splitlines()[-1]

    def said(self, words: str) -> str:
        """The first line with these words, or nothing."""
        return next((line for line in self.output.splitlines() if words in line), "")

    def until(self, what: str, happened: Callable[[], Any], *, within_s: float = 90.0) -> Any:
        """Poll until something is true; return it."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if value := happened():
                return value
            if self.process.poll() is not None:
                raise AssertionError(f"ended before {what}:\n{self.output}")
            time.sleep(0.05)  # nothing tells another process's files: there is no event to await
        raise AssertionError(f"no {what} within {within_s} s:\n{self.output}")

    def events(self, log: str, event: str) -> list[dict[str, Any]]:
        """The events of one log of it so far."""
        lines = json_lines(self.directory / "logs" / f"{log}.jsonl")
        return [line for line in lines if line["event"] == event]

    def child(self, name: str) -> int:
        """The pid of the newest process of its role."""
        return int(self.events(f"launcher-{name}", "process_started")[-1]["pid"])

    def family(self) -> list[psutil.Process]:
        """The launcher and all its descendants."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def finish(self, within_s: float = 60.0) -> int:
        """Wait for the end; return the exit code."""
        return self.process.wait(within_s)

    def kill(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            for process in self.family():
                process.kill()
            self.process.wait()


def make_token(path: Path) -> Path:
    """Write a new token file as the documentation says."""
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return path


def ratchet(*args: str, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a command to its end; return exit code and output."""
    done = subprocess.run(
        [*COMMAND, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        env={**os.environ, **(env or {})},
        check=False,
    )
    return done.returncode, done.stdout
