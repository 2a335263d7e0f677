"""Going on with a run that has ended, in order or not, in its own directory.

Consumes the directory, the configuration it is to go on with, and perhaps the step of a checkpoint;
produces what the launcher must know, and the directory in a state to go on in. Waits for nothing.

Nothing is changed before everything is found to be right. What belongs to steps past the checkpoint
is not thrown away: lines of metrics and evaluations go into `*.lost.jsonl`, an exported model
is renamed, and the old configuration kept beside the new one.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final, NamedTuple

from ratchet.config import Config
from ratchet.errors import ConfigError, UserError
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.agreement import differences
from ratchet.runtime.rundir import free_name, put_aside, recorded_run
from ratchet.storage.checkpoints import Checkpoints
from ratchet.storage.groups import read_groups
from ratchet.storage.sqlite import has_writer
from ratchet.storage.versions import read_versions

_FIXED: Final = ("seed", "model.", "task.", "rollout.group_size")
"""What the weights and the ledger were made with; all else may change from one life to the next."""


class Resume(NamedTuple):
    """What a run is to go on from."""

    step: int | None = None
    """of a checkpoint; None for the newest"""


class Resumption(NamedTuple):
    """A run that goes on."""

    run: RunDirectory
    run_id: str
    step: int | None
    """of the checkpoint that it goes on from; None for the base model, where it died before one"""
    changes: tuple[tuple[str, str, str], ...]
    """(field, now, before) of the configuration"""


def find_config(root: Path) -> Path:
    """Return the configuration of the run in a directory.

    Raises:
        UserError: if there is no run.
    """
    config = RunDirectory(root).config
    if not config.is_file():
        msg = f"{root} holds no run to go on with; give the directory of a run that has started"
        raise UserError(msg)
    return config


def resume_run(root: Path, config: Config, step: int | None) -> Resumption:
    """Find everything that a run goes on from, and put its directory in order.

    Args:
        root: directory of the run.
        config: to go on with.
        step: of the checkpoint; None for the newest.

    Raises:
        UserError: if there is nothing to go on from, the run has not ended, or a field changed that
            must not; nothing was written.
    """
    run = RunDirectory(root)
    find_config(root)
    found = Checkpoints(run.checkpoints, keep=config.checkpoint.keep)
    run_id = recorded_run(run)
    if run_id is None or not run.ledger.exists():
        raise UserError(_without_files(run, found))
    for path in (run.versions, run.ledger):
        if has_writer(path):
            msg = f"the run in {root} has not ended: another process writes {path.name}; stop it"
            raise UserError(msg)
    changes = _changes(run, config)
    if step is not None or found.whole():
        step = found.find(step).facts.step
    elif not found.starts.newest() and any(read_versions(run.versions)):
        msg = (
            f"the run in {root} has been trained, and {run.checkpoints} has nothing of that: bring"
            " it back from a copy, or start a new run"
        )
        raise UserError(msg)
    next(read_groups(run.ledger), None)  # raises if it cannot be read, before anything is changed
    if (step or 0) >= config.trainer.num_steps:
        msg = (
            f"the run in {root} has taken all of its {config.trainer.num_steps} steps; to train on,"
            f" give --set trainer.num_steps=N with N above {step}"
        )
        raise ConfigError(msg)
    try:
        _put_in_order(run, config, step or 0, changed=bool(changes))
    except OSError as error:
        msg = f"cannot go on in {root}: {error}; check its permissions and the free space"
        raise UserError(msg) from None
    return Resumption(run, run_id, step, changes)


def _without_files(run: RunDirectory, found: Checkpoints) -> str:
    missing = [path for path in (run.versions, run.ledger) if not path.exists()]
    if len(missing) > 1 and not found.there():
        return f"the run in {run.root} died before it began: start it again in another directory"
    names = " and ".join(path.name for path in missing)
    return (
        f"{run.root} has no {names}, without which nobody knows what was trained: bring it back"
        " from a copy, or start a new run; `ratchet export` still writes a checkpoint's model"
    )


def _changes(run: RunDirectory, config: Config) -> tuple[tuple[str, str, str], ...]:
    before = run.config.read_text(encoding="utf-8")
    changes = tuple(differences(config.to_toml(), before))
    refused = [change for change in changes if _is_fixed(change[0])]
    if refused:
        listed = "\n  ".join(f"{field} is {now} now and was {was}" for field, now, was in refused)
        msg = (
            f"the run in {run.root} cannot go on with another model, data set, group size or seed;"
            f" change it back, or start a new run:\n  {listed}"
        )
        raise ConfigError(msg)
    return changes


def _is_fixed(field: str) -> bool:
    return any(field == name or (name[-1] == "." and field.startswith(name)) for name in _FIXED)


def _put_in_order(run: RunDirectory, config: Config, step: int, *, changed: bool) -> None:
    put_aside(run, step)
    run.links.unlink(missing_ok=True)
    if changed:
        temporary = run.config.with_suffix(".tmp")
        temporary.write_text(config.to_toml(), encoding="utf-8")
        shutil.copyfile(run.config, free_name(run.root / f"config-before-{step}.toml"))
        temporary.rename(run.config)
