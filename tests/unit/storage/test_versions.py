import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ratchet.errors import StaleTerm, UserError, VersionError
from ratchet.storage.versions import VersionHistory, VersionStore, read_versions
from ratchet.types import VersionRecord


def test_a_record_has_the_columns_of_the_table_in_order() -> None:
    """Rows become records by position."""
    store = VersionStore.open(None)
    columns = store._sql.execute("SELECT * FROM versions").description
    assert (*VersionRecord.__struct_fields__, "decided_at") == tuple(c[0] for c in columns)


def test_file_is_refused_for_a_ledger(tmp_path: Path) -> None:
    path = tmp_path / "versions.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE other (n INTEGER)")
    with pytest.raises(UserError, match="is not a versions file"):
        VersionStore.open(path)
    with pytest.raises(UserError, match="is not a versions file"):
        next(read_versions(path))


def test_every_write_is_on_disk_before_it_returns(tmp_path: Path) -> None:
    """FULL, and no transaction left open: another connection sees each write at once."""
    path = tmp_path / "versions.sqlite"
    store = VersionStore.open(path)
    assert store._sql.execute("PRAGMA synchronous").fetchone() == (2,)
    with closing(sqlite3.connect(path)) as other:

        def states() -> list[str]:
            rows = other.execute("SELECT state FROM versions ORDER BY version")
            return [state for (state,) in rows]

        term = store.acquire_term("trainer-0", "a", 1.0)
        assert other.execute("SELECT term FROM terms").fetchall() == [(1,)]
        store.reserve(term, 0, None, 2.0)
        assert states() == ["reserved"]
        store.commit(0, "d0", 3.0)
        assert states() == ["live"]
        store.reserve(term, 1, 0, 4.0)
        store.burn(1, "no engine", 5.0)
        assert states() == ["live", "burnt"]
    store.close()


def test_the_database_itself_refuses_states_that_cannot_be() -> None:
    store = VersionStore.open(None)
    term = store.acquire_term("trainer-0", "a", 1.0)
    store.reserve(term, 0, None, 1.0)
    for update in (
        "UPDATE versions SET state = 'live', decided_at = 1",
        "UPDATE versions SET state = 'burnt', decided_at = 1",
        "UPDATE versions SET digest = 'd'",
        "UPDATE versions SET state = 'gone'",
        "UPDATE versions SET parent = 0",
        "UPDATE versions SET term = 9",
    ):
        with pytest.raises(sqlite3.IntegrityError):
            store._sql.execute(update)


def test_history_names_the_trainer_and_the_times_beside_a_running_writer(tmp_path: Path) -> None:
    path = tmp_path / "versions.sqlite"
    store = VersionStore.open(path)
    first = store.acquire_term("trainer-0", "a", 1.0)
    store.reserve(first, 0, None, 2.0)
    store.commit(0, "d0", 3.0)
    second = store.acquire_term("trainer-1", "b", 4.0)
    store.reserve(second, 1, 0, 5.0)
    store.burn(1, "no engine", 6.0)
    store.reserve(second, 1, 0, 7.0)
    assert list(read_versions(path)) == [
        VersionHistory(0, 1, 0, None, "live", "d0", None, 2.0, 3.0, "trainer-0"),
        VersionHistory(1, 2, 1, 0, "burnt", None, "no engine", 5.0, 6.0, "trainer-1"),
        VersionHistory(2, 2, 1, 0, "reserved", None, None, 7.0, None, "trainer-1"),
    ]
    store.close()


def test_a_parent_may_be_burnt_but_not_unknown_or_further_on() -> None:
    store = VersionStore.open(None)
    term = store.acquire_term("trainer-0", "a", 0.0)
    store.reserve(term, 5, None, 0.0)
    with pytest.raises(VersionError, match="step 4 lies before step 5 of the parent 0"):
        store.reserve(term, 4, 0, 0.0)
    store.burn(0, "no engine", 0.0)
    with pytest.raises(VersionError, match="version 7 was never reserved"):
        store.reserve(term, 6, 7, 0.0)
    assert store.reserve(term, 6, 0, 0.0) == 1


def test_a_version_reserved_under_an_older_term_is_never_committed() -> None:
    store = VersionStore.open(None)
    old = store.acquire_term("trainer-0", "a", 0.0)
    store.reserve(old, 0, None, 0.0)
    store.commit(0, "d0", 0.0)
    store.reserve(old, 1, 0, 0.0)
    store.acquire_term("trainer-0", "b", 0.0)
    with pytest.raises(StaleTerm, match="term 1 is not the newest one, which is 2"):
        store.commit(1, "d1", 0.0)
    store.commit(0, "d0", 0.0)  # a repeated commit of what is live changes nothing, and may
    store.burn(1, "trainer lost", 0.0)
    assert [record.state for record in store.records()] == ["live", "burnt"]


def test_all_records_are_read_once_until_one_changes() -> None:
    store = VersionStore.open(None)
    term = store.acquire_term("trainer-0", "a", 1.0)
    first = store.reserve(term, 0, None, 2.0)
    assert store.records() is store.records()
    store.commit(first, "d", 3.0)
    second = store.reserve(term, 1, first, 4.0)
    assert [record.state for record in store.records()] == ["live", "reserved"]
    store.burn(second, "why", 5.0)
    assert [record.state for record in store.records()] == ["live", "burnt"]
    store.reserve(term, 1, first, 6.0)
    assert len(store.records()) == 3
