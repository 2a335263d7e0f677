"""What of a ledger is in its file, when, and for whom."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tests.helpers.ledger_rows import finished

from ratchet.storage.groups import read_events, read_groups
from ratchet.storage.ledger import Cursor, GroupLedger, LedgerError


def test_the_budget_of_the_unused_handler_outlives_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = GroupLedger.open(path)
    group_id = ledger.issue("p", 0, 1.0)
    for attempt, counts in enumerate([True, False, True]):
        ledger.claim(group_id, attempt, "rollout-0", 2.0)
        ledger.retry(group_id, attempt, "reward" if counts else "worker_died", 3.0, counts=counts)
    ledger.close()
    with closing(GroupLedger.open(path)) as restarted:
        (row,) = restarted.groups("issued")
    assert (row.attempt, row.retries) == (3, 2)


def test_the_cursor_and_the_groups_are_flushed_together(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = GroupLedger.open(path)
    assert ledger.load_cursor() == Cursor(0, 0)

    def on_disk() -> tuple[int, list[tuple[int, int]]]:
        with closing(sqlite3.connect(path)) as other:
            cursor = other.execute("SELECT epoch, position FROM cursor").fetchall()
            return len(list(read_groups(path))), cursor

    ledger.flush()  # nothing yet, and no harm
    ledger.save_cursor(0, 1)
    ledger.issue("p", 0, 1.0)
    assert on_disk() == (0, [])
    ledger.flush()
    assert on_disk() == (1, [(0, 1)])
    ledger.save_cursor(1, 0)
    assert ledger.load_cursor() == Cursor(1, 0)
    ledger.close()
    ledger.close()
    assert on_disk() == (1, [(1, 0)])


def test_a_refused_transition_leaves_the_others_of_the_flush(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = GroupLedger.open(path)
    finished(ledger)
    with pytest.raises(LedgerError):
        ledger.batch([0, 1], 7, {0: 0, 1: 0}, 4.0)
    with pytest.raises(KeyError):
        ledger.batch([0], 7, {}, 4.0)
    ledger.flush()
    assert [row.state for row in read_groups(path)] == ["finished"]
    ledger.close()


def test_readers_filter_beside_a_running_writer(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = GroupLedger.open(path)
    for group_id in range(3):
        finished(ledger)
        if group_id == 1:
            ledger.drop(group_id, "stale", 4.0)
    ledger.issue("p", 0, 1.0)
    ledger.flush()
    assert [row.group_id for row in read_groups(path)] == [0, 1, 2, 3]
    assert [row.group_id for row in read_groups(path, state="dropped")] == [1]
    assert [row.group_id for row in read_groups(path, version=3)] == [0, 1, 2]
    assert [row.group_id for row in read_groups(path, state="finished", version=2)] == [0, 2]
    assert list(read_groups(path, version=4)) == []
    assert [event.event for event in read_events(path, 1)] == [
        "issued",
        "claimed",
        "finished",
        "dropped",
    ]
    ledger.close()
