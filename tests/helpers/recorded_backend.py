"""A training backend that writes down what it trains, and one that trains what was written down.

Named as `trainer.backend`. Consumes, from the environment, the directory of the record: a file per
optimiser step, with the groups of its batch in their order. A step that is taken again, after a
checkpoint before it, replaces its file: the record holds what the weights of the end are made of.
The weights of both are those of the backend "fsdp", with deterministic algorithms. Waits for
nothing of its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from ratchet.backends.training.base import GradientReport, StepReport, TrainingBackend
from ratchet.backends.training.fsdp import FsdpBackend
from ratchet.config import Config
from ratchet.storage.checkpoint import MANIFEST, Manifest
from ratchet.types import RolloutGroup

RECORD: Final = "RATCHET_TEST_RECORD"
"""environment variable with the path of the directory"""


def read_step(record: Path, step: int) -> tuple[RolloutGroup, ...]:
    """Return the batch of a step."""
    return msgspec.msgpack.decode(_path(record, step).read_bytes(), type=tuple[RolloutGroup, ...])


def _path(record: Path, step: int) -> Path:
    return record / f"step-{step}.msgpack"


class _Counted:
    """What both share: a backend, and the steps of its weights."""

    def __init__(self, config: Config, model_dir: Path) -> None:
        torch.use_deterministic_algorithms(True)
        self.inner: TrainingBackend = FsdpBackend(model_dir, config=config)
        self.record = Path(os.environ[RECORD])
        self.num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def optimizer_step(self) -> StepReport:
        report = await self.inner.optimizer_step()
        self.num_steps += report.applied
        return report

    async def restore(self, directory: Path) -> None:
        await self.inner.restore(directory)
        manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
        self.num_steps = manifest.facts.step


class Recording(_Counted):
    """Writes each batch before it is trained."""

    async def forward_backward(self, groups: Sequence[RolloutGroup]) -> GradientReport:
        path = _path(self.record, self.num_steps + 1)
        temporary = path.with_suffix(".new")
        temporary.write_bytes(msgspec.msgpack.encode(groups))
        temporary.rename(path)
        return await self.inner.forward_backward(groups)


class Replaying(_Counted):
    """Trains the batches that were written, whatever it is given."""

    async def forward_backward(self, groups: Sequence[RolloutGroup]) -> GradientReport:
        return await self.inner.forward_backward(read_step(self.record, self.num_steps + 1))
