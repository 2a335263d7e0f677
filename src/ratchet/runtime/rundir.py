"""The directory of a run, or of one node of it, and the note in it that says how to reach the run.

Consumes a path, a resolved configuration and the way to the registry; produces the directory. Waits
for nothing. An existing run is never written over; a node of the same run may go on in it, and
several may share one.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec

from ratchet.config import Config
from ratchet.errors import ConfigError, UserError
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.placement import TlsFiles
from ratchet.storage.sqlite import open_reader
from ratchet.storage.versions import SCHEMA

_LINKS: Final = "links.json"


class Links(msgspec.Struct, frozen=True):
    """How to reach a run: what `ratchet status DIR` and `ratchet.join(DIR)` read."""

    registry: str
    """its address"""
    run_id: str
    token_file: str | None = None
    """where the secret of the run lies, for those who may read it"""
    tls: TlsFiles | None = None


def links_path(run: RunDirectory) -> Path:
    """Return where a run directory keeps its `Links`."""
    return run.root / _LINKS


def write_links(run: RunDirectory, links: Links) -> None:
    """Write links.json, whole or not at all."""
    path = links_path(run)
    with tempfile.NamedTemporaryFile(dir=run.root, prefix=f".{_LINKS}.", delete=False) as temporary:
        temporary.write(msgspec.json.format(msgspec.json.encode(links), indent=2) + b"\n")
    os.replace(temporary.name, path)  # noqa: PTH105 - both are paths of ours


def read_links(run: RunDirectory) -> Links | None:
    """Return how to reach the run, or None where there is no such note.

    Raises:
        UserError: if it is damaged.
    """
    path = links_path(run)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Links)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        msg = f"{path} cannot be read: {error}; remove it, or give another directory"
        raise UserError(msg) from None


def recorded_run(run: RunDirectory) -> str | None:
    """Return the id of the run whose versions the directory holds, or None if it holds none.

    Raises:
        UserError: if the file is damaged, or newer.
    """
    if not run.versions.exists():
        return None
    with closing(open_reader(run.versions, SCHEMA)) as versions:
        (row,) = versions.execute("SELECT value FROM meta WHERE key = 'run'")
    return str(row[0])


def create_run_directory(root: Path, config: Config) -> RunDirectory:
    """Make a new run directory with its resolved configuration.

    Raises:
        ConfigError: if there is something already, or it cannot be made.
    """
    run = RunDirectory(root)
    try:
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            msg = (
                f"{root} exists already, and a run is never written over;"
                " give another --dir, or remove it"
            )
            raise ConfigError(msg)
        run.logs.mkdir(parents=True)
        run.config.write_text(config.to_toml(), encoding="utf-8")
    except OSError as error:
        msg = f"cannot make the run directory {root}: {error.strerror}; give another --dir"
        raise ConfigError(msg) from None
    return run
