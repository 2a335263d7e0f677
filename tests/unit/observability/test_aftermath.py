"""What the files of a run say when nobody answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ratchet.errors import UserError
from ratchet.observability.aftermath import describe, look_back
from ratchet.observability.rundir import RunDirectory


def write(root: Path, role: str, *events: dict[str, Any]) -> None:
    (root / "logs").mkdir(exist_ok=True)
    lines = (
        json.dumps(
            {"timestamp": f"2026-01-01T00:00:{second:02}.000000Z", "level": "info", "role": role}
            | event
        )
        for second, event in enumerate(events)
    )
    (root / "logs" / f"{role}-0.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_a_run_without_a_word(tmp_path: Path) -> None:
    write(tmp_path, "buffer")
    found = look_back(RunDirectory(tmp_path), "its socket is gone")
    assert (found.outcome, found.cause, found.first_error, found.running) == (
        None, None, None, False,
    )  # fmt: skip
    lines = list(describe(found))
    assert lines[0] == f"{tmp_path}: no run responds: its socket is gone"
    assert lines[1] == "nothing says how it ended: it was killed, or never began"


def test_the_launcher_has_the_last_word_then_the_trainer_then_the_registry(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    ended = {"event": "run_ended", "status": "failed"}
    write(tmp_path, "registry", ended | {"reason": "as the registry has it"})
    assert look_back(run, "").cause == "as the registry has it"
    run.summary.write_text('{"status": "failed", "reason": "as the trainer has it", "steps": 7}')
    found = look_back(run, "")
    assert (found.cause, found.steps) == ("as the trainer has it", 7)
    write(tmp_path, "launcher", ended | {"detail": "as the launcher has it"})
    found = look_back(run, "")
    assert (found.outcome, found.cause) == ("failed", "as the launcher has it")
    assert list(describe(found))[1] == "it ended: failed after 7 steps: as the launcher has it"


def test_the_first_error_and_the_last_ones(tmp_path: Path) -> None:
    errors = [{"event": f"error_{n}", "level": "error"} for n in range(9)]
    write(tmp_path, "buffer", {"event": "fine", "level": "warning"}, *errors)
    (tmp_path / "logs" / "buffer-0.err").write_text("a line without a level\n")
    found = look_back(RunDirectory(tmp_path), "")
    assert found.first_error is not None
    assert "error_0" in found.first_error
    assert [error.split()[3] for error in found.last_errors] == ["error_6", "error_7", "error_8"]
    lines = list(describe(found))
    assert lines[2].startswith("first error: 00:00:01")
    assert len(lines) == 7


def test_a_single_error_is_shown_once(tmp_path: Path) -> None:
    write(tmp_path, "buffer", {"event": "boom", "level": "critical"})
    found = look_back(RunDirectory(tmp_path), "")
    assert sum("boom" in line for line in describe(found)) == 1


def test_a_damaged_summary_is_named(tmp_path: Path) -> None:
    write(tmp_path, "buffer")
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(UserError, match=r"summary\.json cannot be read"):
        look_back(RunDirectory(tmp_path), "")


def test_it_writes_nothing(tmp_path: Path) -> None:
    write(tmp_path, "buffer", {"event": "boom", "level": "error"})
    before = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))
    list(describe(look_back(RunDirectory(tmp_path), "")))
    assert sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*")) == before
