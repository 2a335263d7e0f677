"""Where each trainer of a run began: one small file per term, beside the checkpoints.

Consumes the term of a trainer and the version that it goes on from; produces what tells a
checkpoint of the line that goes on from one of a line that was left. Waits for the disk: a start is
on it before `record` returns.

A trainer that was taken for dead may come back and finish a checkpoint. What it holds has been
given back by then, and trained again by its successor: whoever went on from it would train that
twice. So a checkpoint counts only if every later term began at or after it. Each file has one
writer, as no term is given twice, and none is ever changed: also on a file system that several
machines share there is nothing to lock.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import msgspec

from ratchet.errors import UserError
from ratchet.types import PolicyVersion, Term

_NAME: Final = re.compile(r"term-(\d+)\.json")


class Start(msgspec.Struct, frozen=True):
    """Where the trainer of a term began."""

    term: Term
    version: PolicyVersion | None
    """of the checkpoint; None for the base model"""
    step: int


class Starts:
    """The starts of one run; each term writes its own.

    Args:
        root: directory of the checkpoints; made by the first `record`.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def record(self, start: Start) -> None:
        """Write down where a term begins, before it trains.

        Raises:
            OSError: if it cannot be written.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        path = self._path(start.term)
        temporary = path.with_name(f".{path.name}")
        with temporary.open("wb") as file:
            file.write(msgspec.json.encode(start) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        for directory in (self._root, self._root.parent):
            _sync(directory)

    def withdraw(self, term: Term) -> None:
        """Take a start back: the trainer of that term will not train."""
        self._path(term).unlink()
        _sync(self._root)

    def all(self) -> tuple[Start, ...]:
        """Return every start, by term.

        Raises:
            UserError: if one cannot be read.
        """
        if not self._root.is_dir():
            return ()
        found = sorted(path for path in self._root.iterdir() if _NAME.fullmatch(path.name))
        return tuple(_read(path) for path in found)

    def newest(self) -> Term:
        """Return the newest term that has begun; 0 before the first."""
        return max((start.term for start in self.all()), default=0)

    def _path(self, term: Term) -> Path:
        return self._root / f"term-{term:08d}.json"


def goes_on(term: Term, version: PolicyVersion, starts: tuple[Start, ...]) -> bool:
    """Return whether a version that a term has made is of the line that goes on."""
    later = (start for start in starts if start.term > term)
    return all(start.version is not None and version <= start.version for start in later)


def _read(path: Path) -> Start:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Start)
    except (OSError, msgspec.DecodeError) as error:
        msg = f"{path} cannot be read: {error}; restore it from a copy"
        raise UserError(msg) from None


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
