"""A stalled run explains itself: `ratchet status` beside a real run whose processes are stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.command import Command, kill
from tests.helpers.light_run import light_config
from typer.testing import CliRunner

from ratchet import cli_status

pytestmark = pytest.mark.timeout(180)

CONFIG = light_config(trainer={"num_steps": 100_000, "lr": 1e-3})
ROLES = ["registry", "buffer", "trainer-0", "rollout-0"]


def look(run: Path) -> dict[str, Any]:
    """Ask as `ratchet status --json` does, without the start of another interpreter."""
    result = CliRunner().invoke(cli_status.app, [str(run), "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def role(view: dict[str, Any], name: str) -> dict[str, Any]:
    (row,) = [row for row in view["status"]["roles"] if row["role"]["name"] == name]
    found: dict[str, Any] = row
    return found


class Seen:
    """Looks until something is true of the status; knows how long it took."""

    def __init__(self, command: Command) -> None:
        self._command = command

    def until(
        self, what: str, true_of: Callable[[dict[str, Any]], bool], within_s: float = 30.0
    ) -> tuple[dict[str, Any], float]:
        began = time.monotonic()

        def view() -> dict[str, Any] | None:
            found = look(self._command.directory)
            return found if true_of(found) else None

        return self._command.until(what, view, within_s=within_s), time.monotonic() - began


def all_respond(view: dict[str, Any]) -> bool:
    rows = view["status"]["roles"]
    return sorted(row["role"]["name"] for row in rows) == sorted(ROLES) and all(
        row["up"] and row["connected"] and row["silent_s"] < 2.5 and row["report"] for row in rows
    )


def test_a_stopped_process_is_named_with_what_waits_on_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Command(CONFIG, run) as command:
        command.until("a second step", lambda: len(command.steps()) >= 2)
        seen = Seen(command)
        view, _ = seen.until(
            "all roles, and two steps",
            lambda view: (
                all_respond(view) and role(view, "trainer-0")["report"]["facts"]["step"] >= 2
            ),
        )
        assert view["status"]["live"] is not None
        assert role(view, "buffer")["report"]["facts"]["capacity"] == 8
        assert role(view, "rollout-0")["report"]["pid"] == command.child("rollout-0")

        worker = command.child("rollout-0")
        kill(worker, signal.SIGSTOP)
        view, seconds = seen.until(
            "silence", lambda view: "rollout-0 has not responded" in view["verdict"]
        )
        assert seconds < 8.0  # suspect_s is 5, a heartbeat 1; then the answer of a busy machine
        assert role(view, "rollout-0")["connected"]  # its process is there
        assert all(role(view, name)["silent_s"] < 2.5 for name in ROLES if name != "rollout-0")
        command.until("a word in the log", lambda: command.events("registry-0", "role_suspected"))
        kill(worker, signal.SIGCONT)
        seen.until("all roles again", all_respond)
        command.until("it in the log", lambda: command.events("registry-0", "role_recovered"))
        (suspected,) = command.events("registry-0", "role_suspected")
        assert (suspected["name"], suspected["connected"]) == ("rollout-0", True)

        kill(command.child("buffer"), signal.SIGSTOP)
        view, _ = seen.until(
            "the trainer's wait",
            lambda view: (
                "buffer has not responded" in view["verdict"]
                and any(row["on"] == "buffer" for row in view["chain"]["waits"])
            ),
        )
        kill(command.child("buffer"), signal.SIGCONT)
        # it may have been stopped while it waited itself: then the chain goes on behind it
        (wait,) = (row for row in view["chain"]["waits"] if row["on"] == "buffer")
        assert wait["who"] == "trainer-0"
        assert wait["what"].startswith("the batch of step ")
        assert f"trainer-0 waits {wait['waited_s']:.1f} s on buffer for" in view["verdict"]
        taken = len(command.steps())
        command.until("another step", lambda: len(command.steps()) > taken)
        seen.until("all roles again", all_respond)

        kill(command.process.pid, signal.SIGTERM)
        code, output = command.finish(20.0)
    assert code == 128 + signal.SIGTERM, output
    after = subprocess.run(
        [sys.executable, "-m", "ratchet.cli", "status", str(run)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert after.returncode == 1
    assert "no run responds" in after.stdout
    assert "it ended: stopped: interrupted" in after.stdout
    assert after.stderr == ""
