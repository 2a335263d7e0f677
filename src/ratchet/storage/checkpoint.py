"""One checkpoint: what its manifest says, and whether its files are so.

Consumes a directory, produces a `Checkpoint`; waits for the disk.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import msgspec

from ratchet.errors import UserError
from ratchet.messages import StepTrained
from ratchet.types import PolicyVersion, Term

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1


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
                found = measure(self.path / name)
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


def open_checkpoint(path: Path) -> Checkpoint | None:
    """Return the checkpoint in a directory; None if it has just been removed.

    Raises:
        UserError: if its manifest cannot be read, or was written by a newer release.
    """
    manifest = path / MANIFEST
    try:
        found = msgspec.json.decode(manifest.read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        if not path.exists():
            return None
        msg = f"{manifest} cannot be read: {error}; restore it from a copy, or move {path} away"
        raise UserError(msg) from None
    if found.format > FORMAT:
        msg = (
            f"{manifest} has format {found.format}, and this Ratchet knows up to {FORMAT}: it was"
            " written by a newer release; use that release"
        )
        raise UserError(msg)
    return Checkpoint(path, found.facts, found.files)


def measure(path: Path) -> File:
    """Return what a manifest says of a file.

    Raises:
        OSError: if it cannot be read.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return File(path.stat().st_size, digest)
