"""The durable table of policy versions and terms: versions.sqlite.

Consumes the decisions of its one writer, the VersionRegistry; produces numbers that are never given
twice. Waits for the disk: every write is on it before the call returns (`synchronous=FULL`), so
that a number is still spent after a power cut. Times are wall clock seconds, for people only.

A version is reserved, then either live or burnt, for ever. Fencing is durable here too: only the
newest term reserves and commits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from ratchet.errors import StaleTerm, VersionError
from ratchet.storage.sqlite import Database, Schema, open_reader, refusals
from ratchet.types import PolicyVersion, Term, VersionRecord

SCHEMA = Schema(
    kind="versions",
    version=1,
    tables="""
    CREATE TABLE terms (
        term INTEGER PRIMARY KEY,
        trainer TEXT NOT NULL,
        incarnation TEXT NOT NULL,
        acquired_at REAL NOT NULL
    ) STRICT;
    CREATE TABLE versions (
        version INTEGER PRIMARY KEY CHECK (version >= 0),
        term INTEGER NOT NULL REFERENCES terms (term),
        step INTEGER NOT NULL CHECK (step >= 0),
        parent INTEGER REFERENCES versions (version) CHECK (parent < version),
        state TEXT NOT NULL CHECK (state IN ('reserved', 'live', 'burnt')),
        digest TEXT CHECK ((digest IS NOT NULL) = (state = 'live')),
        reason TEXT CHECK ((reason IS NOT NULL) = (state = 'burnt')),
        created_at REAL NOT NULL,
        decided_at REAL CHECK ((decided_at IS NULL) = (state = 'reserved'))
    ) STRICT;
    """,
)


class VersionHistory(VersionRecord, frozen=True):
    """A version record with what only people want to know."""

    decided_at: float | None = None
    """wall clock when it became live or burnt"""
    trainer: str = ""
    """name of the trainer that held the term"""


class VersionStore:
    """The single writer of the table of versions and terms."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._sql = database.connection
        self._records: tuple[VersionRecord, ...] | None = None
        """all of them, until one changes"""

    @classmethod
    def open(cls, path: Path | None, *, run: str | None = None) -> VersionStore:
        """Open or create the file; None keeps it in memory.

        Raises:
            UserError: if the file is damaged, newer, of another kind or run, or has a writer.
        """
        return cls(Database.open(path, SCHEMA, synchronous="FULL", run=run))

    @property
    def run(self) -> str:
        """Id of the run that the file belongs to."""
        return self._database.run

    def acquire_term(self, trainer: str, incarnation: str, now: float) -> Term:
        """Return a term above all others; on disk before it is returned."""
        row = self._sql.execute(
            "INSERT INTO terms (term, trainer, incarnation, acquired_at)"
            " SELECT coalesce(max(term), 0) + 1, ?, ?, ? FROM terms RETURNING term",
            (trainer, incarnation, now),
        ).fetchall()
        return cast("Term", row[0][0])

    def newest_term(self) -> Term:
        """Return the term in force; 0 before the first one."""
        row = self._sql.execute("SELECT coalesce(max(term), 0) FROM terms").fetchone()
        return cast("Term", row[0])

    def holders(self) -> tuple[tuple[str, str], ...]:
        """Return (trainer, incarnation) of every term, from the first one on."""
        rows = self._sql.execute("SELECT trainer, incarnation FROM terms ORDER BY term")
        return tuple(rows.fetchall())

    def term_of(self, incarnation: str) -> Term | None:
        """Return the last term that a life of a trainer has acquired; None if it has none."""
        row = self._sql.execute(
            "SELECT max(term) FROM terms WHERE incarnation = ?", (incarnation,)
        ).fetchone()
        return cast("Term | None", row[0])

    def reserve(
        self, term: Term, step: int, parent: PolicyVersion | None, now: float
    ) -> PolicyVersion:
        """Return the next number, from 0; on disk before it is returned, and never given again.

        A trainer has one number in hand, which is the parent of its next one. So whoever reserves
        the same again has not heard of the number that it got, and that one is burnt.

        Args:
            term: the newest one.
            step: optimiser steps on the lineage, at least the parent's.
            parent: the version that it descends from, live or not, for burnt weights were trained
                on as well; None for a root.
            now: wall clock.

        Raises:
            StaleTerm: if a newer term is in force, or `term` was never given.
            VersionError: if the parent is unknown, or has more steps.
        """
        self._fence(term)
        self._records = None
        if parent is not None:
            ancestor = self._known(parent)
            if ancestor.step > step:
                msg = f"step {step} lies before step {ancestor.step} of the parent {parent}"
                raise VersionError(msg)
        self._sql.execute(
            "UPDATE versions SET state = 'burnt', reason = 'the reply to its reservation was lost',"
            " decided_at = ? WHERE state = 'reserved' AND term = ? AND step = ? AND parent IS ?",
            (now, term, step, parent),
        )
        row = self._sql.execute(
            "INSERT INTO versions (version, term, step, parent, state, created_at)"
            " SELECT coalesce(max(version), -1) + 1, ?, ?, ?, 'reserved', ? FROM versions"
            " RETURNING version",
            (term, step, parent, now),
        ).fetchall()
        return cast("PolicyVersion", row[0][0])

    def commit(self, version: PolicyVersion, digest: str, now: float) -> None:
        """Make a reserved version live; the same commit again does nothing.

        Raises:
            StaleTerm: if it was reserved under an older term.
            VersionError: if it is unknown, burnt, or live with another digest.
        """
        record = self._known(version)
        if record.state == "live" and record.digest == digest:
            return
        if record.state != "reserved":
            detail = record.digest if record.state == "live" else record.reason
            msg = f"version {version} is {record.state} ({detail}) and cannot be committed"
            raise VersionError(msg)
        self._fence(record.term)
        self._records = None
        self._sql.execute(
            "UPDATE versions SET state = 'live', digest = ?, decided_at = ? WHERE version = ?",
            (digest, now, version),
        )

    def burn(self, version: PolicyVersion, reason: str, now: float) -> None:
        """Spend a reserved number for nothing; burning again does nothing, the first reason stays.

        Raises:
            VersionError: if it is unknown or live.
        """
        record = self._known(version)
        if record.state == "burnt":
            return
        if record.state == "live":
            msg = f"version {version} is live and cannot be burnt"
            raise VersionError(msg)
        self._records = None
        self._sql.execute(
            "UPDATE versions SET state = 'burnt', reason = ?, decided_at = ? WHERE version = ?",
            (reason, now, version),
        )

    def records(self) -> tuple[VersionRecord, ...]:
        """Return every version that was ever reserved, ascending."""
        if self._records is None:  # all roles ask at once when a registry has started again
            rows = self._sql.execute("SELECT * FROM versions ORDER BY version")
            self._records = tuple(_record(row) for row in rows)
        return self._records

    def with_burnt_ancestors(self, versions: Iterable[PolicyVersion]) -> tuple[VersionRecord, ...]:
        """Return these versions, less unknown ones, and the ancestors of each down to the first
        live one: roles are told of those that are live, and would ask for the others one by one.
        """
        found: dict[PolicyVersion, VersionRecord] = {}
        for version in versions:
            record = self.record(version)
            while record is not None and record.version not in found:
                found[record.version] = record
                if record.state == "live" or record.parent is None:
                    break
                record = self.record(record.parent)
        return tuple(found.values())

    def record(self, version: PolicyVersion) -> VersionRecord | None:
        """Return one version, or None if the number was never given."""
        row = self._sql.execute("SELECT * FROM versions WHERE version = ?", (version,)).fetchone()
        return _record(row) if row is not None else None

    def newest_live(self) -> VersionRecord | None:
        """Return the highest live version."""
        row = self._sql.execute(
            "SELECT * FROM versions WHERE state = 'live' ORDER BY version DESC LIMIT 1"
        ).fetchone()
        return _record(row) if row is not None else None

    def newest(self) -> PolicyVersion | None:
        """Return the highest number that was ever given."""
        row = self._sql.execute("SELECT max(version) FROM versions").fetchone()
        return cast("PolicyVersion | None", row[0])

    def num_burnt(self) -> int:
        """Return how many numbers were spent for nothing."""
        row = self._sql.execute("SELECT count(*) FROM versions WHERE state = 'burnt'").fetchone()
        return cast("int", row[0])

    def close(self) -> None:
        """Close the file; closing again does nothing."""
        self._database.close()

    def _known(self, version: PolicyVersion) -> VersionRecord:
        record = self.record(version)
        if record is None:
            msg = f"version {version} was never reserved"
            raise VersionError(msg)
        return record

    def _fence(self, term: Term) -> None:
        newest = self.newest_term()
        if term != newest:
            msg = f"term {term} is not the newest one, which is {newest}"
            raise StaleTerm(msg)


def read_versions(path: Path) -> Iterator[VersionHistory]:
    """Yield every version, ascending, beside a running writer.

    Raises:
        UserError: if the file is missing, damaged, newer or of another kind.
    """
    with closing(open_reader(path, SCHEMA)) as connection, refusals(path):
        rows = connection.execute(
            "SELECT versions.*, trainer FROM versions JOIN terms USING (term) ORDER BY version"
        )
        for row in rows:
            yield VersionHistory(*row)


def _record(row: tuple[Any, ...]) -> VersionRecord:
    return VersionRecord(*row[:-1])  # a record has no `decided_at`
