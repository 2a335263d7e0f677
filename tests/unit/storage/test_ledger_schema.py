"""The tables of a ledger: their columns and indices, and how an older file is brought up."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.ledger_rows import RESULT, finished

from ratchet.errors import UserError
from ratchet.storage import transitions
from ratchet.storage.groups import SCHEMA, GroupEvent, GroupRow, read_events, read_groups
from ratchet.storage.ledger import GroupLedger


@pytest.mark.parametrize(("table", "row"), [("groups", GroupRow), ("events", GroupEvent)])
def test_rows_have_the_columns_of_their_table_in_order(table: str, row: Any) -> None:
    columns = GroupLedger.open(None)._sql.execute(
        "SELECT name FROM pragma_table_info(?) ORDER BY cid", (table,)
    )
    assert row.__struct_fields__ == tuple(name for (name,) in columns)


def as_of_version_1(path: Path) -> None:
    """Make the file what the first schema was."""
    ledger = GroupLedger.open(path)
    finished(ledger)
    ledger.close()
    old = """DROP TRIGGER group_changed;
        CREATE TRIGGER group_changed AFTER UPDATE OF state ON groups BEGIN
            INSERT INTO events VALUES (NEW.group_id, NEW.changed_at,
            iif(NEW.state = 'issued', 'retried', NEW.state), NULL);
        END;
        DROP TRIGGER group_issued;
        CREATE TRIGGER group_issued AFTER INSERT ON groups BEGIN
            INSERT INTO events VALUES (NEW.group_id, NEW.changed_at, NEW.state, NULL);
        END;
        DROP INDEX groups_trained;
        CREATE INDEX groups_by_state ON groups (state, reason);
        CREATE INDEX events_by_group ON events (group_id);
        PRAGMA user_version = 1;"""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(old)


def test_a_ledger_of_the_first_schema_is_read_and_brought_up(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    as_of_version_1(path)
    assert [row.state for row in read_groups(path)] == ["finished"]  # which changes nothing
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    ledger = GroupLedger.open(path)
    ledger.retry(0, 0, "buffer_died", 4.0)
    ledger.finish(0, 1, **RESULT, now=5.0, requeued=True)
    ledger.close()
    assert [event.event for event in read_events(path, 0)][-1] == "requeued"
    GroupLedger.open(path).close()  # and nothing more to bring up
    fresh = GroupLedger.open(None)
    query = "SELECT name, sql FROM sqlite_master ORDER BY name"
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute(query).fetchall() == fresh._sql.execute(query).fetchall()


def test_no_transition_of_an_open_group_changes_an_index() -> None:
    """Each index costs it two places to find in a tree that grows with the groups that are open."""
    ledger = GroupLedger.open(None)
    query = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
    ((name, sql),) = ledger._sql.execute(query).fetchall()
    assert (name, sql.partition("WHERE")[2].strip()) == ("groups_trained", "state = 'trained'")
    plan = ledger._sql.execute("EXPLAIN QUERY PLAN " + transitions.COMMIT, (0.0, 1)).fetchall()
    assert [row[-1] for row in plan] == [
        "SEARCH groups USING INDEX groups_trained (trained_step<?)"
    ]


def test_a_migration_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.sqlite"
    as_of_version_1(path)
    before = path.read_bytes()
    broken = SCHEMA._replace(migrations=("DROP TRIGGER group_changed; SELECT 1 FROM missing;",))
    monkeypatch.setattr("ratchet.storage.ledger.SCHEMA", broken)
    with pytest.raises(UserError, match="no such table"):
        GroupLedger.open(path)
    assert path.read_bytes() == before
