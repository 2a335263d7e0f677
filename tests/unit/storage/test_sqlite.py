import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ratchet.errors import UserError
from ratchet.storage.sqlite import Database, Schema, open_reader

SCHEMA = Schema(kind="numbers", version=2, tables="CREATE TABLE numbers (n INTEGER) STRICT")


def create(path: Path, run: str | None = None, rows: int = 0) -> None:
    database = Database.open(path, SCHEMA, synchronous="NORMAL", run=run)
    for n in range(rows):
        database.connection.execute("INSERT INTO numbers VALUES (?)", (n,))
    database.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a run" / "numbers?#%.sqlite"  # names that an URI has to quote


@pytest.fixture(autouse=True)
def _directory(path: Path) -> None:
    path.parent.mkdir()


def test_what_is_written_is_read_again(path: Path) -> None:
    create(path, rows=3)
    assert sorted(name.name for name in path.parent.iterdir()) == [path.name, f"{path.name}.lock"]
    with closing(open_reader(path, SCHEMA)) as reader:
        assert reader.execute("SELECT n FROM numbers").fetchall() == [(0,), (1,), (2,)]


def test_a_file_keeps_the_run_it_was_made_for(path: Path) -> None:
    create(path, run="first")
    database = Database.open(path, SCHEMA, synchronous="NORMAL")
    assert database.run == "first"
    database.close()
    with pytest.raises(UserError, match="belongs to run 'first', not to 'second'"):
        Database.open(path, SCHEMA, synchronous="NORMAL", run="second")


def test_files_made_without_a_run_get_different_ones() -> None:
    runs = {Database.open(None, SCHEMA, synchronous="NORMAL").run for _ in range(2)}
    assert len(runs) == 2


def test_a_second_writer_is_refused_until_the_first_has_closed(path: Path) -> None:
    first = Database.open(path, SCHEMA, synchronous="NORMAL")
    with pytest.raises(UserError, match="is being written by another process"):
        Database.open(path, SCHEMA, synchronous="NORMAL")
    first.close()
    first.close()
    Database.open(path, SCHEMA, synchronous="NORMAL").close()


def test_a_reader_sees_commits_of_a_running_writer_and_cannot_write(path: Path) -> None:
    writer = Database.open(path, SCHEMA, synchronous="NORMAL")
    with closing(open_reader(path, SCHEMA)) as reader:
        writer.connection.execute("BEGIN IMMEDIATE")
        writer.connection.execute("INSERT INTO numbers VALUES (7)")
        assert reader.execute("SELECT n FROM numbers").fetchall() == []
        writer.connection.execute("COMMIT")
        assert reader.execute("SELECT n FROM numbers").fetchall() == [(7,)]
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader.execute("INSERT INTO numbers VALUES (8)")
    writer.close()


@pytest.mark.parametrize("synchronous", ["NORMAL", "FULL"])
def test_pragmas(path: Path, synchronous: str) -> None:
    database = Database.open(path, SCHEMA, synchronous=synchronous)
    levels = {"NORMAL": 1, "FULL": 2}
    for pragma, value in (
        ("journal_mode", "wal"),
        ("synchronous", levels[synchronous]),
        ("foreign_keys", 1),
        ("user_version", 2),
    ):
        assert database.connection.execute(f"PRAGMA {pragma}").fetchone() == (value,)
    database.close()


def refusal(path: Path) -> str:
    """Both the writer and a reader refuse, in the same words, and the lock is free again."""
    with pytest.raises(UserError) as by_writer:
        Database.open(path, SCHEMA, synchronous="NORMAL")
    with pytest.raises(UserError) as by_reader:
        open_reader(path, SCHEMA)
    assert str(by_writer.value) == str(by_reader.value)
    assert str(path) in str(by_writer.value)
    return str(by_writer.value)


def test_a_newer_schema_is_refused(path: Path) -> None:
    create(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 3")
    text = refusal(path)
    assert "has schema 3, and this Ratchet knows up to 2" in text
    assert "newer release" in text
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (3,)


def test_a_file_of_another_kind_is_refused(path: Path) -> None:
    create(path)
    other = SCHEMA._replace(kind="letters")
    with pytest.raises(UserError, match="is not a letters file of Ratchet"):
        Database.open(path, other, synchronous="NORMAL")


def test_a_foreign_database_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE numbers (n INTEGER)")
    assert "is not a numbers file of Ratchet" in refusal(path)


def test_an_empty_file_is_refused_and_not_begun_again(path: Path) -> None:
    path.touch()
    assert "is not a numbers file of Ratchet" in refusal(path)
    assert path.stat().st_size == 0


@pytest.mark.parametrize(("offset", "length"), [(0, 100), (4096, 4096), (3 * 4096, 8)])
def test_a_damaged_file_is_refused(path: Path, offset: int, length: int) -> None:
    create(path, rows=2000)
    data = bytearray(path.read_bytes())
    data[offset : offset + length] = b"\xff" * length
    path.write_bytes(data)
    assert "is damaged" in refusal(path)


def test_a_truncated_file_is_refused(path: Path) -> None:
    create(path, rows=2000)
    os.truncate(path, path.stat().st_size // 2)
    assert "is damaged" in refusal(path)


def test_a_half_built_file_of_a_crash_is_begun_again(path: Path) -> None:
    aside = path.with_name(f"{path.name}.new")
    aside.write_bytes(b"half of a page")
    create(path, rows=1)
    assert not aside.exists()


def test_a_missing_file_is_not_created_by_a_reader(path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        open_reader(path, SCHEMA)
    assert list(path.parent.iterdir()) == []


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write beside .*nowhere"):
        Database.open(tmp_path / "nowhere" / "n.sqlite", SCHEMA, synchronous="NORMAL")


class _Protected(sqlite3.Connection):
    """In a write-protected directory, SQLite cannot make the files that WAL needs."""

    def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
        if sql == "PRAGMA user_version":
            msg = "unable to open database file"
            raise sqlite3.OperationalError(msg)
        return super().execute(sql, *arguments)


def test_a_write_protected_copy_is_readable_when_nobody_can_be_writing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permissions are faked, as they do not bind root."""
    create(path, rows=2)
    connect = sqlite3.connect

    def protected(target: str, **options: Any) -> sqlite3.Connection:
        if "immutable" in target:
            return connect(target, **options)
        return connect(target, factory=_Protected, **options)

    monkeypatch.setattr(sqlite3, "connect", protected)
    with pytest.raises(UserError, match="cannot open"):
        open_reader(path, SCHEMA)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with closing(open_reader(path, SCHEMA)) as reader:
        assert reader.execute("SELECT count(*) FROM numbers").fetchone() == (2,)
    path.with_name(f"{path.name}-wal").write_bytes(b"what a writer has not yet moved over")
    with pytest.raises(UserError, match="cannot open"):
        open_reader(path, SCHEMA)
