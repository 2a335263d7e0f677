"""Checkpoints: a directory each, whole or not there, whatever ends the process or the machine.

Consumes files, written between `begin` and `finish`, and the facts they belong to; produces
`version-N/` with a manifest; waits for the disk.

A checkpoint is written under another name, each file of it synced, then the manifest with the
length and SHA-256 of each, then the directory; only then is it renamed, and the directory above
synced. So what has the right name has everything, also after a power cut. Old ones are removed only
after the new one is whole, by renaming them first: a checkpoint that is removed half way has no
right name any more. What a crash leaves under other names is removed by the next `begin`. What
cannot be removed stays, and is told: it stands in the way of nothing new.

Checkpoints of a line that a later trainer has left (`starts.py`) do not count: nobody goes on from
them, the trainer that is replaced makes no more of them, and they are removed with the old ones.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from ratchet.errors import StaleTerm, UserError
from ratchet.storage.checkpoint import (
    FORMAT,
    MANIFEST,
    Checkpoint,
    CheckpointFacts,
    File,
    Manifest,
    measure,
    open_checkpoint,
)
from ratchet.storage.starts import Starts, goes_on
from ratchet.types import PolicyVersion

_NAME: Final = re.compile(r"version-(\d+)")
_UNFINISHED: Final = ".unfinished-"
_REMOVED: Final = ".removed-"


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
        not_removed: told of what could not be removed, and why.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep: int,
        disk: Disk | None = None,
        not_removed: Callable[[Path, Exception], None] = lambda _path, _error: None,
    ) -> None:
        self._root = root
        self._keep = keep
        self._disk = disk or Disk()
        self._not_removed = not_removed
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
        self._clear(version)
        unfinished = self._unfinished(version)
        unfinished.mkdir()
        return unfinished

    def finish(self, facts: CheckpointFacts) -> Checkpoint:
        """Make what was begun and written a checkpoint, then remove the oldest beyond `keep`.

        Raises:
            OSError: if it does not become one; the others stay as they are.
            StaleTerm: if a newer trainer has begun; all checkpoints stay as they are.
        """
        self._check(facts)
        unfinished, path = self._unfinished(facts.version), self._path(facts.version)
        files = self._seal(unfinished, facts)
        self._disk.rename(unfinished, path)
        self._disk.sync(self._root)
        self._check(facts)  # it may have stood still meanwhile: what is old for it is not for all
        self._remove_old()
        return Checkpoint(path, facts, files)

    def _remove_old(self) -> None:
        try:
            kept = {each.path for each in self.whole()[-self._keep :]}
            old = [each.path for each in self.there() if each.path not in kept]
        except (OSError, UserError) as error:  # one of them is damaged: none is touched
            self._not_removed(self._root, error)
            return
        for path in old:
            try:
                self._remove(path)
            except OSError as error:
                self._not_removed(path, error)

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
        found = (open_checkpoint(entry) for _, entry in sorted(entries))
        return tuple(checkpoint for checkpoint in found if checkpoint is not None)

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
        files = {str(p.relative_to(directory)): measure(p) for p in paths if p.is_file()}
        manifest = directory / MANIFEST
        content = msgspec.json.encode(Manifest(FORMAT, facts, files))
        for path in paths:
            self._disk.sync(path)
        manifest.write_bytes(msgspec.json.format(content, indent=2) + b"\n")
        self._disk.sync(manifest)
        self._disk.sync(directory)
        return files

    def _clear(self, version: PolicyVersion) -> None:
        """Remove what a crash has left before this version. A later one is being written by the
        trainer that has replaced this one.
        """
        for entry in self._root.iterdir():
            prefix = next((p for p in (_UNFINISHED, _REMOVED) if entry.name.startswith(p)), "")
            number = _number(entry.name.removeprefix(prefix)) if prefix else None
            if number is None or (prefix == _UNFINISHED and number > version):
                continue
            try:
                self._disk.remove(entry)
            except OSError as error:
                if entry.exists():  # else another trainer has removed it
                    self._not_removed(entry, error)

    def _remove(self, path: Path) -> None:
        gone = path.with_name(f"{_REMOVED}{path.name}")
        self._disk.rename(path, gone)
        self._disk.sync(self._root)
        self._disk.remove(gone)


def _named(entry: Path) -> int | None:
    """Return one more than the version of a checkpoint's directory; None if it is none."""
    number = _number(entry.name)
    return None if number is None else number + 1


def _number(name: str) -> PolicyVersion | None:
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])
