"""Each check of an audit holds on a run, and fails on a damage of its own."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.audited_run import write_checkpoint, write_run
from typer.testing import CliRunner, Result

from ratchet import cli_audit
from ratchet.errors import UserError
from ratchet.observability.rundir import RunDirectory


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run(tmp_path_factory.mktemp("audit") / "run")
    write_checkpoint(run, version=2, step=2, term=1)
    return run.root


@pytest.fixture
def run(template: Path, tmp_path: Path) -> RunDirectory:
    shutil.copytree(template, tmp_path / "run")
    return RunDirectory(tmp_path / "run")


def invoke(*arguments: Any) -> Result:
    result = CliRunner().invoke(cli_audit.app, [str(argument) for argument in arguments])
    if isinstance(result.exception, UserError):
        raise result.exception
    return result


def audit(run: RunDirectory) -> tuple[int, dict[str, list[str]]]:
    """Return the exit code, and what is wrong, by check."""
    result = invoke("audit", run.root, "--json")
    findings = [json.loads(line) for line in result.stdout.splitlines()]
    assert all(found["num_checked"] > 0 for found in findings), findings
    return result.exit_code, {f["check"]: f["wrong"] for f in findings if f["num_wrong"]}


def edit(path: Path, *statements: str) -> None:
    """Change the rows as no transition would."""
    with closing(sqlite3.connect(path)) as sql:
        sql.execute("PRAGMA ignore_check_constraints = ON")
        triggers = sql.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")
        found = triggers.fetchall()
        for name, _ in found:
            sql.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            assert sql.execute(statement).rowcount > 0, statement
        for _, create in found:
            sql.execute(create)
        sql.commit()


def test_a_run_holds_and_says_what_was_checked(run: RunDirectory) -> None:
    assert audit(run) == (0, {})
    lines = invoke("audit", run.root).stdout.splitlines()
    assert len(lines) == 12
    assert "I1  no version is missing: 6, holds" in lines
    assert "I2  trained within max_staleness: 6, holds" in lines
    assert "I3  no group is missing: 8, holds" in lines
    assert {line[:2] for line in lines} == {"I1", "I2", "I3", "I5"}


DAMAGES = [
    ("versions", "UPDATE terms SET term = 5 WHERE term = 2", "no term is missing"),
    ("versions", "DELETE FROM versions WHERE version = 3", "no version is missing"),
    ("versions", "UPDATE versions SET term = 2 WHERE version = 1", "versions, terms and steps"),
    ("versions", "UPDATE versions SET parent = 5 WHERE version = 4", "versions, terms and steps"),
    ("versions", "UPDATE versions SET step = 1 WHERE version = 5", "versions, terms and steps"),
    ("versions", "UPDATE versions SET digest = NULL WHERE version = 5", "versions, terms and"),
    ("ledger", "UPDATE groups SET staleness = 2 WHERE group_id = 0", "within max_staleness"),
    ("ledger", "UPDATE groups SET min_version = 0 WHERE group_id = 5", "within max_staleness"),
    ("ledger", "UPDATE groups SET max_version = 9 WHERE group_id = 5", "within max_staleness"),
    ("ledger", "UPDATE groups SET trained_step = NULL WHERE group_id = 5", "within max_stalen"),
    ("ledger", "UPDATE groups SET trained_version = 5 WHERE group_id = 5", "within max_stale"),
    ("ledger", "DELETE FROM groups WHERE group_id = 3", "no group is missing"),
    ("ledger", "UPDATE cursor SET position = position + 1", "the cursor is"),
    ("ledger", "UPDATE cursor SET epoch = 0", "the cursor is"),
    ("ledger", "UPDATE groups SET prompt_id = 'p1' WHERE group_id = 0", "issued twice"),
    ("ledger", "UPDATE groups SET epoch = 0 WHERE group_id = 4", "issued twice"),
    ("ledger", "UPDATE groups SET state = 'dropped' WHERE group_id = 4", "one life"),
    ("ledger", "UPDATE groups SET attempt = 0 WHERE group_id = 4", "one life"),
    ("ledger", "INSERT INTO events VALUES (4, 1.0, 'trained', '3')", "one life"),
    ("ledger", "INSERT INTO events VALUES (40, 1.0, 'issued', NULL)", "one life"),
    ("ledger", "DELETE FROM events WHERE group_id = 2 AND event = 'finished'", "one life"),
    (
        "ledger",
        "UPDATE groups SET trained_step = 3, trained_version = 4 WHERE group_id = 0",
        "more than a batch",
    ),
    ("ledger", "UPDATE groups SET state = 'committed' WHERE group_id = 5", "a checkpoint has"),
    ("ledger", "UPDATE groups SET trained_version = 5 WHERE group_id = 2", "a checkpoint has"),
    (
        "ledger",
        "INSERT INTO events SELECT group_id, 1.0, 'finished', NULL FROM groups",
        "more open groups",
    ),
]


@pytest.mark.parametrize(("file", "damage", "check"), DAMAGES)
def test_what_does_not_hold_is_named(run: RunDirectory, file: str, damage: str, check: str) -> None:
    edit(getattr(run, file), damage)
    code, wrong = audit(run)
    assert code == 1
    assert any(check in name for name in wrong), wrong
    assert "WRONG" in invoke("audit", run.root).stdout


def test_a_checkpoint_that_is_gone_is_missed(run: RunDirectory) -> None:
    write_checkpoint(run, version=5, step=3, term=2)
    shutil.rmtree(run.checkpoints / "version-00000002")
    assert audit(run) == (0, {})  # the newer one has it all
    shutil.rmtree(run.checkpoints / "version-00000005")
    result = invoke("audit", run.root)
    assert result.exit_code == 1
    assert "group 0 of step 1, version 0 is in no checkpoint" in result.stdout


def test_a_checkpoint_of_an_unknown_version_is_named(run: RunDirectory) -> None:
    write_checkpoint(run, version=9, step=3, term=2)
    assert list(audit(run)[1]) == ["checkpoints are of known versions"]


def test_the_limits_are_those_of_all_lives(run: RunDirectory) -> None:
    edit(run.ledger, "UPDATE groups SET staleness = 2 WHERE group_id = 0")
    before = run.config.read_text()
    assert audit(run)[0] == 1
    (run.root / "config-before-2.toml").write_text(
        before.replace("max_staleness = 1", "max_staleness = 2")
    )
    assert audit(run) == (0, {})


def test_a_damaged_file_is_refused(run: RunDirectory) -> None:
    data = bytearray(run.ledger.read_bytes())
    data[4096:8192] = bytes(4096)
    run.ledger.write_bytes(data)
    with pytest.raises(UserError, match="is damaged"):
        audit(run)
