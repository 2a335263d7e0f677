"""A role as a process: its last words, and what ends it. Light roles only: no torch here."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.helpers.config import small_config

from ratchet.messages import Down, RunEnded, StopTraining
from ratchet.runtime.placement import Placement
from ratchet.runtime.role import (
    EndOfActor,
    RoleOutcome,
    log_name,
    outcome_of,
)
from ratchet.runtime.rundir import create_run_directory, read_links
from ratchet.transport.mailbox.address import Address
from ratchet.types import RoleInfo


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        ("stopped", RoleOutcome("stopped")),
        ("RunFailed: no batch: why", RoleOutcome("failed", "RunFailed: no batch: why")),
        ("cancelled", RoleOutcome("failed", "cancelled")),
        ("ConfigError: model.path: no", RoleOutcome("user_error", "model.path: no")),
        ("TaskError: no prompts", RoleOutcome("user_error", "no prompts")),
        ("UserError: damaged", RoleOutcome("user_error", "damaged")),
        (
            "RunFailed: buffer has lost the registry: it died",
            RoleOutcome("failed", "RunFailed: buffer has lost the registry: it died"),
        ),
    ],
)
def test_the_end_of_an_actor_is_judged_by_its_reason(reason: str, outcome: RoleOutcome) -> None:
    assert outcome_of(reason) == outcome


def test_the_end_of_the_run_is_told_apart_from_a_stop() -> None:
    over = RunEnded("finished", "3 steps are trained")
    assert outcome_of("stopped", over) == RoleOutcome("finished", "3 steps are trained")
    assert outcome_of("stopped", RunEnded("failed", "x")) == RoleOutcome("run_failed", "x")
    assert outcome_of("RunFailed: y", over).status == "failed"


def test_who_was_replaced_does_not_come_back() -> None:
    reason = (
        "RunFailed: rollout-0 has lost the registry: registry refuses the link: a newer process has"
        " taken the name rollout-0"
    )
    outcome = outcome_of(reason)
    assert (outcome.status, outcome.replaced) == ("user_error", True)
    assert outcome.detail.startswith("a newer process has taken the name rollout-0, and this one")
    assert "--node-rank" in outcome.detail


def test_an_actor_ends_once() -> None:
    async def main() -> None:
        end = EndOfActor("trainer-0")
        end.tell(StopTraining("not this"))
        assert not end.reason.done()
        end.tell(Down("trainer-0", "first"))
        end.tell(Down("trainer-0", "second"))
        assert await end.reason == "first"

    asyncio.run(main())


def test_names_of_logs() -> None:
    assert log_name(RoleInfo("buffer", "buffer", "x")) == "buffer-0"
    assert log_name(RoleInfo("rollout", "rollout-3", "x")) == "rollout-3"
    assert log_name(RoleInfo("trainer", "trainer-0", "x")) == "trainer-0"


class Role:
    """`python -m ratchet.runtime.role` for the registry."""

    def __init__(self, tmp_path: Path, kind: str = "registry", **sections: Any) -> None:
        self.run = create_run_directory(tmp_path / "run", small_config(**sections))
        sockets = tmp_path / "sockets"
        sockets.mkdir(mode=0o700)
        self.key = "ab" * 32
        placement = Placement(
            roles=(),
            run_dir=self.run.root,
            run_id="run-id",
            registry=Address("unix", f"{sockets}/registry.sock"),
            key=bytes.fromhex(self.key),
            sockets=sockets,
            token_file=tmp_path / "token",
        )
        spec = placement.spec(kind, kind, "life-1")  # type: ignore[arg-type]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ratchet.runtime.role"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(spec) + b"\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, list[bytes], str]:
        """Close its standard input after it has ended; exit code, output lines, errors."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        lines = self.process.stdout.read().splitlines()  # until it has left
        errors = self.process.stderr.read().decode()
        self.process.communicate()
        return self.process.returncode, lines, errors


BROKEN = """
print("from the user's code")
raise RuntimeError("no data today")
"""


def test_a_users_mistake_is_its_last_word_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(BROKEN)
    role = Role(tmp_path, task={"name": f"{tmp_path}/task.py:Task", "args": {}})
    code, lines, errors = role.end()
    assert code == 2
    (line,) = lines  # and nothing that the user's code printed
    outcome = msgspec.json.decode(line, type=RoleOutcome)
    assert outcome.status == "user_error"
    assert "no data today" in outcome.detail
    assert "from the user's code" in errors
    assert "Traceback" not in errors


CRASHES = """
class Task:
    def prompts(self, split):
        raise KeyError("a bug")
    def score(self, prompt, completion):
        return 0.0
"""


def test_an_unexpected_error_is_told_and_shown_with_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(CRASHES)
    role = Role(tmp_path, "buffer", task={"name": f"{tmp_path}/task.py:Task", "args": {}})
    code, (line,), errors = role.end()
    outcome = msgspec.json.decode(line, type=RoleOutcome)
    assert (code, outcome) == (1, RoleOutcome("failed", "KeyError: 'a bug'"))
    assert "Traceback" in errors


def test_a_signal_ends_it_in_order_and_its_log_has_no_key(tmp_path: Path) -> None:
    role = Role(tmp_path)
    try:
        _until_it_handles_sigterm(role)
        assert role.key not in Path(f"/proc/{role.process.pid}/cmdline").read_text()
        assert role.key not in Path(f"/proc/{role.process.pid}/environ").read_text()
        role.process.terminate()
        code, (line,), _ = role.end()
    finally:
        role.process.kill()
    assert (code, msgspec.json.decode(line, type=RoleOutcome)) == (0, RoleOutcome("stopped"))
    links = read_links(role.run)  # for whoever wants to join
    assert links is not None
    assert (links.run_id, links.token_file) == ("run-id", f"{tmp_path}/token")
    assert links.registry == f"unix:{tmp_path}/sockets/registry.sock"
    log = (role.run.logs / "registry-0.jsonl").read_text()
    assert role.key not in log
    assert json.loads(log.splitlines()[-1])["event"] == "role_ended"


def test_the_end_of_its_launcher_is_its_end(tmp_path: Path) -> None:
    role = Role(tmp_path)
    try:
        _until_it_handles_sigterm(role)
        role.process.communicate(timeout=30)  # closes the pipe
    finally:
        role.process.kill()
    assert role.process.returncode == 1


def _until_it_handles_sigterm(role: Role) -> None:
    """Another process's state: there is no event to await."""
    status = Path(f"/proc/{role.process.pid}/status")
    deadline = time.monotonic() + 60
    while True:
        (caught,) = re.findall(r"SigCgt:\s*([0-9a-f]+)", status.read_text())
        if int(caught, 16) & 1 << (signal.SIGTERM - 1):
            return
        assert time.monotonic() < deadline
        time.sleep(0.02)
