"""What is on the disk after a crash: images of SQLite's files.

SQLite runs on real files in memory (/dev/shm). A killed process leaves them as they are: the kernel
has what was written. After a power cut, what was not synced is there in part, frame by frame of the
write-ahead log: each frame of it is kept or lost on its own. A file written with `synchronous=FULL`
has synced each frame of a finished transaction; one with NORMAL syncs its log only at a checkpoint,
before the main file changes.

Rejected: a file system layer of our own below SQLite (apsw's VFS), as it brings its own build of
SQLite and another interface, so that not the product's code would run, but a translation of it.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

_MEMORY: Final = Path("/dev/shm")
_HEADER: Final = 32
_FRAME: Final = 24


class Disk:
    """The files of one world."""

    def __init__(self, seed: int) -> None:
        place = _MEMORY if _MEMORY.is_dir() else None
        self._directory = tempfile.TemporaryDirectory(prefix="ratchet-disk-", dir=place)
        self.root = Path(self._directory.name)
        self._rng = random.Random(f"disk/{seed}")
        self._images = 0
        self.versions = self.root / "versions.sqlite"
        self.ledger = self.root / "ledger.sqlite"

    def close(self) -> None:
        """Remove everything."""
        self._directory.cleanup()

    def image(self, path: Path, *, synced: bool) -> Path:
        """Return a copy of a file as it is found after a crash.

        Args:
            path: of the database; its log is beside it.
            synced: nothing written is lost: the process was killed, or it synced what it wrote.
        """
        self._images += 1
        directory = self.root / f"image-{self._images}"
        directory.mkdir()
        copy = directory / path.name
        shutil.copyfile(path, copy)
        log = path.with_name(f"{path.name}-wal")
        if log.exists():
            data = bytearray(log.read_bytes())
            if not synced:
                self._lose_frames(data)
            copy.with_name(log.name).write_bytes(data)
        return copy

    def _lose_frames(self, log: bytearray) -> None:
        if len(log) < _HEADER:
            return
        page = int.from_bytes(log[8:12], "big")
        share = self._rng.choice([0.0, 0.05, 0.5, 1.0])
        tail = self._rng.randrange(0, max(1, (len(log) - _HEADER) // (page + _FRAME)))
        for index, start in enumerate(range(_HEADER, len(log), page + _FRAME)):
            if index >= tail and self._rng.random() < share:
                end = min(len(log), start + page + _FRAME)
                log[start:end] = bytes(end - start)


class Failing:
    """A connection whose writes may fail, as on a disk that is full or broken."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.error: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def execute(self, sql: str, *args: Any) -> Any:
        """Run a statement; one that writes fails while there is an error."""
        writes = sql.lstrip().split(None, 1)[0].upper() not in {"SELECT", "PRAGMA", "ROLLBACK"}
        if self.error is not None and writes:
            raise sqlite3.OperationalError(self.error)
        return self._connection.execute(sql, *args)


@contextmanager
def a_disk(seed: int) -> Iterator[Disk]:
    """A disk that is removed at the end."""
    disk = Disk(seed)
    try:
        yield disk
    finally:
        disk.close()


def synced(store: Any) -> bool:
    """Whether a store has synced each transaction before it says that it is finished."""
    (level,) = store._sql.execute("PRAGMA synchronous").fetchone()
    return bool(level >= 2)  # FULL


def fail(store: Any, error: str | None) -> Callable[[], None]:
    """Let the writes of a store fail from now on; return what mends it."""
    if not isinstance(store._sql, Failing):
        store._sql = Failing(store._sql)
    store._sql.error = error

    def mend() -> None:
        store._sql.error = None

    return mend
