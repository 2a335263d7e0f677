"""kill -9 of every process of a run, at seeded moments: it goes on, and its files add up."""

from __future__ import annotations

import dataclasses
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from benchmarks.chaos import Chaos
from benchmarks.chaos_check import ViolationError, check
from benchmarks.chaos_plan import TARGETS, Plan

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

PLAN = Plan(num_kills=20, seed=7)

FAULTS = {
    "a group number is missing": (
        "ledger",
        "DELETE FROM groups WHERE group_id = 7",
    ),
    "a prompt ended twice": (
        "ledger",
        "UPDATE groups SET prompt_id = (SELECT prompt_id FROM groups WHERE group_id = 4)"
        " WHERE group_id = 5",
    ),
    "an epoch is over, and has not each prompt": (
        "ledger",
        "UPDATE groups SET epoch = 1000 WHERE group_id = 3",
    ),
    "not trained on exactly one batch": (
        "ledger",
        "UPDATE groups SET trained_step = 2 WHERE group_id ="
        " (SELECT min(group_id) FROM groups WHERE trained_step = 3)",
    ),
    "trained again without being given back": (
        "ledger",
        "INSERT INTO events SELECT * FROM events WHERE event = 'trained' LIMIT 1",
    ),
    "orphans, or missing": (
        "ledger",
        "UPDATE groups SET state = 'finished' WHERE state = 'committed' AND group_id = 6",
    ),
    "a version went backwards": (
        "versions",
        "UPDATE versions SET term = 1 WHERE version = (SELECT max(version) FROM versions)",
    ),
    "a version is missing": (
        "versions",
        "DELETE FROM versions WHERE version = (SELECT max(version) - 1 FROM versions)",
    ),
}


def test_a_run_goes_on_whoever_dies_and_a_fault_in_its_files_is_seen(tmp_path: Path) -> None:
    assert {target for target, _, _ in PLAN.kills()} == set(TARGETS)
    root = tmp_path / "run"
    outcome = Chaos(PLAN, root).play()
    check(root, outcome)

    for number, (what, (file, fault)) in enumerate(FAULTS.items()):
        copy = tmp_path / f"fault-{number}"
        shutil.copytree(root, copy)
        with closing(sqlite3.connect(copy / f"{file}.sqlite")) as sql:
            sql.execute(fault)
            sql.commit()
        with pytest.raises(ViolationError, match=what):
            check(copy, outcome)
    with pytest.raises(ViolationError, match="ended without being killed"):
        check(root, dataclasses.replace(outcome, kills=[]))
