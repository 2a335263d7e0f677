"""What the SQLite files of a run have in common: one writer, a checked schema, readers beside it.

Consumes a path and a `Schema`, produces a `Database` (the one writer) or a read-only connection
(anyone, also while the writer runs). Waits for the disk only: a second writer is refused at once,
and a reader never blocks the writer (WAL, https://sqlite.org/wal.html).

A new file is built aside and renamed into place, so a file that exists always has its schema:
an empty or a foreign one is refused, and counting never starts again at 0 by accident.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import quote

from ratchet.errors import UserError

_META = "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;"
_PAGE_BYTES = 2048
"""Half of SQLite's default: a commit writes whole pages, for a row or two of each. A file keeps the
size that it was made with.
"""
_CACHE_KIB = 64 * 1024
"""The ledger of a large run is more than the 2 MB that SQLite keeps by itself."""


class Schema(NamedTuple):
    """The tables of one kind of file."""

    kind: str
    """what the file is, in one word"""
    version: int
    """`PRAGMA user_version` of the files that this code writes, from 1"""
    tables: str
    """SQL that creates them"""
    migrations: tuple[str, ...] = ()
    """SQL that makes version 2 of version 1, 3 of 2, and so on up to `version`; readers read older
    files as they are, so it must leave to them what they select
    """


class Database:
    """The one writer of a file: a connection in autocommit mode and the lock that keeps others out.

    Calls may come from any thread, one at a time.
    """

    def __init__(self, connection: sqlite3.Connection, lock: int | None) -> None:
        self.connection = connection
        self._lock = lock
        self.is_open = True
        row = connection.execute("SELECT value FROM meta WHERE key = 'run'").fetchone()
        self.run: str = row[0]
        """Id of the run that the file belongs to."""

    @classmethod
    def open(
        cls,
        path: Path | None,
        schema: Schema,
        *,
        synchronous: Literal["NORMAL", "FULL"],
        run: str | None = None,
    ) -> Database:
        """Open or create a file for writing.

        Args:
            path: the file, in a directory that exists; None keeps everything in memory.
            schema: what it must contain.
            synchronous: FULL survives a power cut with every commit; NORMAL survives the death of
                the process with every commit, and a power cut with all but the last ones.
            run: id to give to a new file, and to find in an old one.

        Raises:
            UserError: if the file is damaged, newer, of another kind or run, or has a writer.
        """
        if path is None:
            connection = _connect(":memory:")
            _create(connection, schema, run)
            return cls(connection, None)
        lock = _lock(path)
        try:
            with refusals(path):
                if not path.exists():
                    _build(path, schema, run)
                connection = _connect(_uri(path, "mode=rw"))
                try:
                    check(connection, path, schema, run, thorough=True)
                    _migrate(connection, schema)
                    connection.execute("PRAGMA journal_mode = WAL").fetchone()
                    connection.execute(f"PRAGMA synchronous = {synchronous}")
                    connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
                    return cls(connection, lock)
                except BaseException:
                    connection.close()
                    raise
        except BaseException:
            os.close(lock)
            raise

    def close(self) -> None:
        """Close the file and let go of the lock; closing again does nothing."""
        self.is_open = False
        self.connection.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def has_writer(path: Path) -> bool:
    """Whether a process writes this file now.

    Raises:
        UserError: if that cannot be found out.
    """
    try:
        os.close(_lock(path))
    except HasWriterError:
        return True
    return False


class HasWriterError(UserError):
    """The file has a writer, in this process or another."""


def open_reader(path: Path, schema: Schema) -> sqlite3.Connection:
    """Open a file read-only, whether or not it has a writer.

    Raises:
        UserError: if it is missing, damaged, newer or of another kind.
    """
    if not path.is_file():
        msg = f"{path} does not exist; give the directory of a run that has started"
        raise UserError(msg)
    with refusals(path):
        connection = _connect(_uri(path, "mode=ro"))
        try:
            try:
                check(connection, path, schema, None)
            except sqlite3.OperationalError:
                if _may_have_a_writer(path):
                    raise
                connection.close()
                connection = _connect(_uri(path, "mode=ro&immutable=1"))
                check(connection, path, schema, None)
        except BaseException:
            connection.close()
            raise
    return connection


def check(
    connection: sqlite3.Connection,
    path: Path,
    schema: Schema,
    run: str | None,
    *,
    thorough: bool = False,
) -> None:
    """Refuse a file that is not what it should be.

    Args:
        connection: to the file.
        path: its name, for people.
        schema: what it must contain.
        run: whose it must be, if anyone's.
        thorough: compare the indexes with the tables, too; that takes twice as long.

    Raises:
        UserError: if it is newer, of another kind or run, or fails SQLite's own check.
    """
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if found > schema.version:
        msg = (
            f"{path} has schema {found}, and this Ratchet knows up to {schema.version}: it was"
            " written by a newer release; use that release, or another run directory"
        )
        raise UserError(msg)
    pragma = "integrity_check" if thorough else "quick_check"
    problems = [row[0] for row in connection.execute(f"PRAGMA {pragma}(3)")]
    if problems != ["ok"]:
        raise UserError(_damaged(path, "; ".join(problems)))
    tables = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone()
    meta = dict(connection.execute("SELECT key, value FROM meta")) if tables else {}
    if found < 1 or meta.get("kind") != schema.kind or "run" not in meta:
        msg = (
            f"{path} is not a {schema.kind} file of Ratchet (schema {found}, kind"
            f" {meta.get('kind')!r}); move it away, or use another run directory"
        )
        raise UserError(msg)
    if run is not None and meta["run"] != run:
        msg = (
            f"{path} belongs to run {meta['run']!r}, not to {run!r}; use the directory of that run,"
            " or a new one"
        )
        raise UserError(msg)


@contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Turn what SQLite says about a file that cannot be used into a `UserError`."""
    try:
        yield
    except sqlite3.OperationalError as error:
        msg = (
            f"cannot open {path}: {error}; check that the directory exists, its permissions, and"
            " the free space"
        )
        raise UserError(msg) from error
    except sqlite3.DatabaseError as error:
        raise UserError(_damaged(path, str(error))) from error


def _may_have_a_writer(path: Path) -> bool:
    log = path.with_name(f"{path.name}-wal")
    return os.access(path.parent, os.W_OK) or (log.exists() and log.stat().st_size > 0)


def _damaged(path: Path, detail: str) -> str:
    return (
        f"{path} is damaged ({detail}); restore it from a copy, together with the files whose names"
        " begin the same, or start a new run directory"
    )


def _uri(path: Path, options: str) -> str:
    return f"file:{quote(str(path.absolute()))}?{options}"


def _connect(target: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        target,
        uri=target.startswith("file:"),
        isolation_level=None,  # autocommit: every transaction is begun in sight
        check_same_thread=False,
        cached_statements=64,
    )
    connection.execute("PRAGMA busy_timeout = 5000")  # a reader may race with a checkpoint
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _create(connection: sqlite3.Connection, schema: Schema, run: str | None) -> None:
    connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
    connection.executescript(
        f"BEGIN; {_META} {schema.tables}; PRAGMA user_version = {schema.version}; COMMIT;"
    )
    connection.executemany(
        "INSERT INTO meta (key, value) VALUES (?, ?)",
        [("kind", schema.kind), ("run", run if run is not None else uuid.uuid4().hex)],
    )


def _migrate(connection: sqlite3.Connection, schema: Schema) -> None:
    """Bring an older file to this schema, each version whole or not at all."""
    found: int = connection.execute("PRAGMA user_version").fetchone()[0]
    for version, migration in enumerate(schema.migrations[found - 1 :], start=found + 1):
        connection.executescript(f"BEGIN; {migration} PRAGMA user_version = {version}; COMMIT;")


def _build(path: Path, schema: Schema, run: str | None) -> None:
    aside = path.with_name(f"{path.name}.new")
    aside.unlink(missing_ok=True)
    with closing(_connect(_uri(aside, "mode=rwc"))) as connection:
        connection.execute("PRAGMA synchronous = FULL")
        _create(connection, schema, run)
    aside.rename(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _lock(path: Path) -> int:
    # beside the file, as SQLite keeps locks of its own in it; the kernel lets go when we die
    name = path.with_name(f"{path.name}.lock")
    try:
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        msg = f"cannot write beside {path}: {error.strerror}; check the directory"
        raise UserError(msg) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        msg = (
            f"{path} is being written by another process; one run directory has one run: stop the"
            " other one, or use another directory"
        )
        raise HasWriterError(msg) from None
    return lock
