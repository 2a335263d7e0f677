"""Checkpoints: a directory each, whole or not there, whatever ends the process or the machine.

Consumes files, written between `begin` and `finish`, and the facts they belong to; produces
`version-N/` with a manifest; waits for the disk.

A checkpoint is written under another name, each file of it synced, then the manifest with the
length and SHA-256 of each, then the directory; only then is it renamed, and the directory above
synced. So what has the right name has everything, also after a power cut. Old ones are removed only
after the new one is whole, by renaming them first: a checkpoint that is removed half way has no
right name any more. What a crash leaves under other names is removed by the next `begin`.

Checkpoints of a line that a later trainer has left (`starts.py`) do not count: nobody goes on from
them, the trainer that is replaced makes no more of them, and they are removed with the old ones.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Final

import msgspec

from ratchet.errors import StaleTerm, UserError
from ratchet.messages import StepTrained
from ratchet.storage.starts import Starts, goes_on
from ratchet.types import PolicyVersion, Term

MANIFEST: Final = "manifest.json"
_FORMAT: Final = 1
_NAME: Final = re.compile(r"version-(\d+)")
_UNFINISHED: Final = ".unfinished-"
_REMOVED: Final = ".removed-"


class CheckpointFacts(msgspec.Struct, frozen=True):
    """What a checkpoint is of."""

    run: str
    """id of the run"""
    version: PolicyVersion
    """the number of the weights; unique in the run, also where two branches have the same step"""
    step: int
    """optimiser steps on the lineage of that version"""
    term: Term
    """of the trainer that wrote it"""
    data: str
    """fingerprint of the training prompts"""
    done: StepTrained | None
    """what became of the batch of that step, in case the buffer did not hear of it"""
    created_at: float
    """wall clock, seconds since the epoch; for people"""


class File(msgspec.Struct, frozen=True, array_like=True):
    """One file of a checkpoint, as it must be."""

    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """The last file of a checkpoint that is written."""

    format: int
    facts: CheckpointFacts
    files: dict[str, File]
    """by the path below the checkpoint's directory"""


class Checkpoint(msgspec.Struct, frozen=True):
    """A whole checkpoint."""

    path: Path
    facts: CheckpointFacts
    files: dict[str, File]

    def verify(self) -> None:
        """Read every file and compare it with the manifest.

        Raises:
            UserError: naming the first file that is not as it was written.
        """
        for name, file in self.files.items():
            try:
                found = _measure(self.path / name)
            except OSError as error:
                raise UserError(self._damaged(name, error.strerror or str(error))) from None
            if found != file:
                detail = f"{found.num_bytes} bytes, SHA-256 {found.sha256[:12]}"
                wanted = f"{file.num_bytes} bytes, {file.sha256[:12]}"
                raise UserError(self._damaged(name, f"{detail} in the place of {wanted}"))

    def _damaged(self, name: str, detail: str) -> str:
        return (
            f"checkpoint {self.path} is damaged: {name}: {detail}; restore it from a copy, or go on"
            " from another step"
        )


class Disk:
    """What must come to the disk in an order; a test has one that stops between any two of them."""

    def sync(self, path: Path) -> None:
        """Return when a file's content, or a directory's entries, would survive a power cut."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Give a directory another name, at once."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        """Remove a directory with all that is in it."""
        shutil.rmtree(path)


class Checkpoints:
    """The checkpoints of one run; there is one writer, or a newer one that has replaced it.

    Args:
        root: directory of the checkpoints; made by the first `begin`.
        keep: how many stay, the newest ones.
        disk: where the order of writing matters.
    """

    def __init__(self, root: Path, *, keep: int, disk: Disk | None = None) -> None:
        self._root = root
        self._keep = keep
        self._disk = disk or Disk()
        self.starts = Starts(root)

    def begin(self, version: PolicyVersion) -> Path:
        """Return an empty directory for the files of a checkpoint.

        Raises:
            FileExistsError: if there is a checkpoint of this version.
            OSError: if it cannot be made.
        """
        path = self._path(version)
        if path.exists():
            msg = f"{path} is there already"
            raise FileExistsError(msg)
        self._root.mkdir(parents=True, exist_ok=True)
        self._clear()
        unfinished = self._unfinished(version)
        unfinished.mkdir()
        return unfinished

    def finish(self, facts: CheckpointFacts) -> Checkpoint:
        """Make what was begun and written a checkpoint, then remove the oldest beyond `keep`.

        Raises:
            OSError: if that fails; the others stay as they are.
            StaleTerm: if a newer trainer has begun; all checkpoints stay as they are.
        """
        self._check(facts)
        unfinished, path = self._unfinished(facts.version), self._path(facts.version)
        files = self._seal(unfinished, facts)
        self._disk.rename(unfinished, path)
        self._disk.sync(self._root)
        self._check(facts)  # it may have stood still meanwhile: what is old for it is not for all
        kept = {each.path for each in self.whole()[-self._keep :]}
        for old in self.there():
            if old.path not in kept:
                self._remove(old.path)
        return Checkpoint(path, facts, files)

    def _check(self, facts: CheckpointFacts) -> None:
        newest = self.starts.newest()
        if newest > facts.term:
            msg = (
                f"the checkpoint of version {facts.version} is of term {facts.term}, and term"
                f" {newest} has begun: another trainer has taken over"
            )
            raise StaleTerm(msg)

    def abandon(self, version: PolicyVersion) -> None:
        """Remove what was begun; what cannot be removed now is by the next `begin`."""
        shutil.rmtree(self._unfinished(version), ignore_errors=True)

    def _path(self, version: PolicyVersion) -> Path:
        return self._root / f"version-{version:08d}"

    def _unfinished(self, version: PolicyVersion) -> Path:
        return self._root / f"{_UNFINISHED}{self._path(version).name}"

    def whole(self) -> tuple[Checkpoint, ...]:
        """Return every checkpoint of the line that goes on, by version; their files are not read.

        Raises:
            UserError: if a manifest cannot be read, or was written by a newer release.
        """
        starts = self.starts.all()
        there = self.there()
        return tuple(c for c in there if goes_on(c.facts.term, c.facts.version, starts))

    def there(self) -> tuple[Checkpoint, ...]:
        """Return every checkpoint, those of lines that were left included, by version.

        Raises:
            UserError: if a manifest cannot be read, or was written by a newer release.
        """
        if not self._root.is_dir():
            return ()
        entries = [(match, entry) for entry in self._root.iterdir() if (match := _named(entry))]
        return tuple(_open(entry) for _, entry in sorted(entries))

    def find(self, step: int | None = None) -> Checkpoint:
        """Return the newest checkpoint, of a step where one is given, with every file as written.

        Raises:
            UserError: if there is none, or it is damaged.
        """
        whole = self.whole()
        found = [each for each in whole if step is None or each.facts.step == step]
        if not found:
            steps = ", ".join(str(each.facts.step) for each in whole)
            what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            msg = f"{self._root} has {what}; " + (
                f"there are those of steps {steps}" if steps else "start the run anew"
            )
            raise UserError(msg)
        found[-1].verify()
        return found[-1]

    def _seal(self, directory: Path, facts: CheckpointFacts) -> dict[str, File]:
        paths = sorted(directory.rglob("*"))
        files = {str(p.relative_to(directory)): _measure(p) for p in paths if p.is_file()}
        manifest = directory / MANIFEST
        content = msgspec.json.encode(Manifest(_FORMAT, facts, files))
        for path in paths:
            self._disk.sync(path)
        manifest.write_bytes(msgspec.json.format(content, indent=2) + b"\n")
        self._disk.sync(manifest)
        self._disk.sync(directory)
        return files

    def _clear(self) -> None:
        """Remove what a crash has left."""
        for entry in self._root.iterdir():
            if entry.name.startswith((_UNFINISHED, _REMOVED)):
                self._disk.remove(entry)

    def _remove(self, path: Path) -> None:
        gone = path.with_name(f"{_REMOVED}{path.name}")
        self._disk.rename(path, gone)
        self._disk.sync(self._root)
        self._disk.remove(gone)


def _named(entry: Path) -> int | None:
    """Return one more than the version of a checkpoint's directory; None if it is none."""
    match = _NAME.fullmatch(entry.name)
    return None if match is None else int(match[1]) + 1


def _open(path: Path) -> Checkpoint:
    manifest = path / MANIFEST
    try:
        found = msgspec.json.decode(manifest.read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        msg = f"{manifest} cannot be read: {error}; restore it from a copy, or move {path} away"
        raise UserError(msg) from None
    if found.format > _FORMAT:
        msg = (
            f"{manifest} has format {found.format}, and this Ratchet knows up to {_FORMAT}: it was"
            " written by a newer release; use that release"
        )
        raise UserError(msg)
    return Checkpoint(path, found.facts, found.files)


def _measure(path: Path) -> File:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return File(path.stat().st_size, digest)
