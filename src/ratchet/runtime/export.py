"""The model in a checkpoint as Hugging Face safetensors.

Consumes the directory of a run, ended or not, and the step of one of its checkpoints; produces a
new directory. Waits for the disk and for torch. The run is not touched: a base model that the run
itself would have built is built again, from the same seed, where it is missing.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from ratchet.config import Config
from ratchet.errors import ConfigError, UserError
from ratchet.imports import import_chosen
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.compose import TRAINERS
from ratchet.runtime.resume import find_config
from ratchet.storage.checkpoint import Checkpoint, CheckpointFacts
from ratchet.storage.checkpoints import Checkpoints


def export_checkpoint(root: Path, output: Path, step: int | None = None) -> CheckpointFacts:
    """Write model, config and tokenizer of a checkpoint into a new directory.

    Args:
        root: directory of the run.
        output: appears whole or not at all.
        step: of the checkpoint; None for the newest.

    Returns:
        What the checkpoint is of.

    Raises:
        UserError: if there is no such run or checkpoint, it is damaged or was removed meanwhile,
            the model does not load, or the directory is there or cannot be written.
    """
    run = RunDirectory(root)
    find_config(root)
    config = run.load_config()
    if output.exists():
        msg = f"{output} is there already, and nothing is written over it; give another directory"
        raise ConfigError(msg)
    found = Checkpoints(run.checkpoints, keep=config.checkpoint.keep).find(step)
    with tempfile.TemporaryDirectory(prefix="ratchet-export-") as scratch:
        base = run.base if run.base.exists() else Path(scratch) / "base"
        try:
            asyncio.run(_export(config, base, found, output))
        except OSError as error:
            msg = f"cannot export {found.path} to {output}: {error}; check both, and the free space"
            raise UserError(msg) from None
    return found.facts


async def _export(config: Config, base: Path, found: Checkpoint, output: Path) -> None:
    from ratchet.runtime.base_model import ensure_base_model

    create = import_chosen("trainer.backend", config.trainer.backend, TRAINERS)
    backend = create(config, ensure_base_model(config, base))
    try:
        await backend.start()
        await backend.restore(found.path)
        await backend.export(output)
    finally:
        await backend.close()
