"""The directory of a run, or of one node of it, and the note in it that says how to reach the run.

Consumes a path, a resolved configuration and the way to the registry; produces the directory. Waits
for nothing. An existing run is never written over; a node of the same run may go on in it, and
several may share one.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from contextlib import closing
from errno import ENOTDIR
from pathlib import Path
from typing import NamedTuple

import msgspec

from ratchet.config import Config
from ratchet.errors import ConfigError, UserError
from ratchet.observability.metrics import cut_metrics
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.agreement import check_same
from ratchet.runtime.placement import TlsFiles
from ratchet.storage.sqlite import open_reader
from ratchet.storage.versions import SCHEMA
from ratchet.transport.mailbox.address import Address
from ratchet.types import RoleKind


class Links(msgspec.Struct, frozen=True):
    """How to reach a run: what `ratchet status DIR` and `ratchet.join(DIR)` read."""

    registry: str
    """its address"""
    run_id: str
    token_file: str | None = None
    """where the secret of the run lies, for those who may read it"""
    tls: TlsFiles | None = None


def write_links(run: RunDirectory, links: Links) -> None:
    """Write links.json, whole or not at all."""
    temporary = run.links.with_name(f".{run.links.name}.{os.getpid()}")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(links), indent=2) + b"\n")
    temporary.replace(run.links)


def read_links(run: RunDirectory) -> Links | None:
    """Return how to reach the run, or None where there is no such note.

    Raises:
        UserError: if it is damaged.
    """
    return _read_links(run.links)


def _read_links(path: Path) -> Links | None:
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
    if not _make_whole(run, config, links=None):
        msg = (
            f"{root} exists already, and a run is never written over;"
            " give another --dir, or remove it"
        )
        raise ConfigError(msg)
    return run


class Hosted(NamedTuple):
    """The run in the directory of a registry."""

    run_id: str
    address: Address
    """where its registry is to listen"""


def host_run_directory(run: RunDirectory, config: Config, address: Address) -> Hosted:
    """Make the directory of a registry, or go on in it; links.json comes when it listens.

    Args:
        run: the directory.
        config: of the run.
        address: where to listen; at port 0 where the registry of the run has listened before, as
            that is where all others look for it.

    Raises:
        ConfigError: if the directory is of another run, or cannot be made.
    """
    if _make_whole(run, config, links=None):
        return Hosted(uuid.uuid4().hex, address)
    _check_config(run, config)
    kept = run.links.with_suffix(".before")
    if run.links.exists():
        read_links(run)  # one that is damaged is left where it is
        run.links.replace(kept)
    before = _read_links(kept)
    if before is None:
        return Hosted(recorded_run(run) or uuid.uuid4().hex, address)
    registry = Address.parse(before.registry)
    return Hosted(recorded_run(run) or before.run_id, address.known_as(registry))


def same_address(run: RunDirectory, address: Address) -> Address:
    """Return where a registry that may choose its port is to listen: where its last life did, under
    the same launcher, and where all others look for it.
    """
    links = read_links(run)
    return address.known_as(None if links is None else Address.parse(links.registry))


def join_run_directory(
    run: RunDirectory, config: Config, links: Links, *, kind: RoleKind, is_trained: bool = False
) -> None:
    """Make the directory of a node of a run, or go on in it; it may be that of other roles, too.

    Args:
        run: the directory.
        config: of the run.
        links: to the run.
        kind: of the role.
        is_trained: the run has a buffer already that knows which prompts were trained.

    Raises:
        ConfigError: if it is of another run, lacks what an earlier life of the role has left, or
            cannot be made.
    """
    if kind == "buffer" and is_trained and not run.ledger.exists():
        msg = (
            f"the run has been trained already, and {run.root} has nothing of that: a buffer that"
            " begins there would issue every prompt again; give as --dir the directory of its"
            " buffer"
        )
        raise ConfigError(msg)
    if _make_whole(run, config, links):
        return
    _check_config(run, config)
    before = read_links(run)
    run_id = before.run_id if before is not None else recorded_run(run)
    if run_id is not None and run_id != links.run_id:
        msg = (
            f"{run.root} belongs to run {run_id}, and the registry at {links.registry} has run"
            f" {links.run_id}; give another --dir, or remove it"
        )
        raise ConfigError(msg)
    if before is None:
        write_links(run, links)


def put_aside(run: RunDirectory, step: int) -> None:
    """Take away what a trainer has written past a step that training goes on from: nothing is
    thrown away but the summary.

    Lines of metrics and evaluations go into `*.lost.jsonl`, an exported model gets another name.
    """
    for path in (run.metrics, run.evals):
        cut_metrics(path, step)
    if run.model.exists():
        run.model.rename(free_name(run.root / f"model-before-{step}"))
    run.summary.unlink(missing_ok=True)


def free_name(path: Path) -> Path:
    """Return the path, or the next of its kind that is free."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free


def _make_whole(run: RunDirectory, config: Config, links: Links | None) -> bool:
    """Make the directory and all in it at once; False if there is something already."""
    try:
        if run.root.exists() and (not run.root.is_dir() or any(run.root.iterdir())):
            return False
        if run.root.parent.is_file():
            raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR))
        run.root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=run.root.parent, prefix=f".{run.root.name}.") as name:
            whole = RunDirectory(Path(name) / run.root.name)
            whole.logs.mkdir(parents=True)
            whole.config.write_text(config.to_toml(), encoding="utf-8")
            if links is not None:
                write_links(whole, links)
            try:
                whole.root.rename(run.root)
            except OSError:
                if run.config.exists():  # another launcher of the run was first
                    return False
                raise
    except OSError as error:
        msg = f"cannot make the run directory {run.root}: {error.strerror}; give another --dir"
        raise ConfigError(msg) from None
    return True


def _check_config(run: RunDirectory, config: Config) -> None:
    if not run.config.is_file():
        msg = f"{run.root} exists already and is no run directory; give another --dir"
        raise ConfigError(msg)
    check_same(config, run.config.read_text(encoding="utf-8"), whose=f"the run in {run.root}")
