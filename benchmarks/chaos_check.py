"""What must hold of the files of a run, in words of this benchmark's own, beside `ratchet audit`.

Consumes the directory of an ended run of `benchmarks.chaos`; produces the first of what does not
hold. Waits for `ratchet audit`.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.chaos_plan import BATCH_GROUPS, NUM_PROMPTS, ROLES, Kill, Outcome
from tests.helpers.command import json_lines

from ratchet.observability.metrics import read_metrics
from ratchet.observability.rundir import RunDirectory


class ViolationError(Exception):
    """Something that must not happen."""


def ask(path: Path, query: str) -> list[tuple[Any, ...]]:
    """Ask a database of a run that may be written to; a damaged one cannot be asked."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as sql:
        return sql.execute(query).fetchall()


NOTHING = {
    "a group number is missing (lost)": (
        "ledger",
        "SELECT group_id FROM groups WHERE group_id > 0"
        " AND group_id - 1 NOT IN (SELECT group_id FROM groups)",
    ),
    "a prompt ended twice in an epoch": (
        "ledger",
        "SELECT epoch, prompt_id FROM groups WHERE state IN ('trained', 'committed', 'dropped')"
        " GROUP BY epoch, prompt_id HAVING count(*) > 1",
    ),
    "an epoch is over, and has not each prompt": (
        "ledger",
        "SELECT epoch FROM groups WHERE epoch < (SELECT max(epoch) FROM groups)"
        f" GROUP BY epoch HAVING count(DISTINCT prompt_id) <> {NUM_PROMPTS}",
    ),
    "a step was not trained on exactly one batch": (
        "ledger",
        "SELECT trained_step FROM groups WHERE state IN ('trained', 'committed')"
        f" GROUP BY trained_step HAVING count(*) <> {BATCH_GROUPS}",
    ),
    "a group was trained again without being given back": (
        "ledger",
        "SELECT t.group_id FROM events t JOIN events u ON u.group_id = t.group_id"
        " AND u.rowid > t.rowid AND t.event = 'trained' AND u.event = 'trained'"
        " AND NOT EXISTS (SELECT 1 FROM events r WHERE r.group_id = t.group_id"
        " AND r.event = 'retried' AND r.rowid BETWEEN t.rowid AND u.rowid)",
    ),
    "a version went backwards (term, or decided before an older one of its term)": (
        "versions",
        "SELECT b.version FROM versions a JOIN versions b ON b.version = a.version + 1"
        " WHERE b.term < a.term OR (b.term = a.term AND b.step < a.step)"
        " OR b.created_at < a.created_at",
    ),
    "a version is missing": (
        "versions",
        "SELECT version FROM versions WHERE version > 0"
        " AND version - 1 NOT IN (SELECT version FROM versions)",
    ),
}
"""What must be found nowhere, of which file, and the question."""


def started(run: RunDirectory, name: str) -> list[int]:
    """Return the process ids of all lives of a role."""
    lines = json_lines(run.logs / "launcher-0.jsonl")
    return [e["pid"] for e in lines if e["event"] == "process_started" and e["name"] == name]


def died(run: RunDirectory, kills: Sequence[Kill]) -> list[str]:
    """Return the roles that had more lives than kills, their own and the launcher's, explain."""
    killed = Counter(kill.name for kill in kills)
    most = 1 + killed["launcher"]
    return [name for name in ROLES if len(started(run, name)) > most + killed[name]]


def check(root: Path, outcome: Outcome) -> None:
    """Check an ended run.

    Raises:
        ViolationError: something does not hold.
    """
    run = RunDirectory(root)
    problems = [
        f"{what}: {found[:5]}"
        for what, (file, query) in NOTHING.items()
        if (found := ask(getattr(run, file), query))
    ]
    finished = {
        row[0] for row in ask(run.ledger, "SELECT group_id FROM groups WHERE state = 'finished'")
    }
    kept = {int(path.stem) for path in run.payloads.iterdir()}
    if kept != finished:
        problems.append(f"payloads are orphans, or missing: {sorted(kept ^ finished)[:5]}")
    if others := died(run, outcome.kills):
        problems.append(f"ended without being killed: {others}")
    steps = [line["step"] for line in read_metrics(run.metrics)]
    num_steps = outcome.num_steps
    if steps != list(range(1, num_steps + 1)):
        problems.append(f"the lines of metrics are not steps 1 to {num_steps}: {steps}")
    command = [sys.executable, "-m", "ratchet.cli", "audit", str(root)]
    audit = subprocess.run(command, capture_output=True, text=True, check=False)
    if audit.returncode:
        problems.append(audit.stdout + audit.stderr)
    if problems:
        raise ViolationError("\n".join(problems))
