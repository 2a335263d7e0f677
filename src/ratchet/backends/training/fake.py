"""A training backend without a model: deterministic, scripted, and as fast as asked.

Consumes groups and a script, produces weights that differ after every applied step; waits for
nothing but `asyncio.sleep`, so that a simulation with virtual time decides how long a step takes.
Torch is imported only where a real transport reads the weights.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ratchet.backends.training.base import GradientReport, StepReport
from ratchet.transport.weights.base import TensorSpec
from ratchet.types import Prompt, RolloutGroup, WeightProbe

if TYPE_CHECKING:
    import torch

NAME: Final = "w"
"""the only weight"""
_FILE: Final = "weights.json"


class FakeBackend:
    """A `TrainingBackend` whose weight "w" is a small vector: w[0] counts the applied steps, w[1]
    adds up the mean rewards trained on.
    """

    def __init__(
        self,
        *,
        size: int = 4,
        seed: int = 0,
        forward_backward_s: float = 0.0,
        optimizer_s: float = 0.0,
        bad_gradients: Collection[int] = (),
        bad_steps: Collection[int] = (),
    ) -> None:
        """Script the run.

        Args:
            size: numbers in "w", at least 2.
            seed: of the first "w".
            forward_backward_s: seconds that the first half of a step takes.
            optimizer_s: seconds that the second half takes.
            bad_gradients: calls of `forward_backward`, from 1, that report what is not finite.
            bad_steps: the same calls whose `optimizer_step` is then refused.
        """
        self._size = size
        self._seed = seed
        self._forward_backward_s = forward_backward_s
        self._optimizer_s = optimizer_s
        self._bad_gradients = frozenset(bad_gradients)
        self._bad_steps = frozenset(bad_steps)
        self._w: npt.NDArray[np.float32] | None = None
        self._gradient: float | None = None
        self.num_batches = 0
        """calls of `forward_backward`"""

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        """A copy of "w" [size]."""
        return self._started.copy()

    async def start(self) -> None:
        """Make the base weights from the seed."""
        generator = np.random.default_rng(self._seed)
        self._w = generator.standard_normal(self._size).astype(np.float32)
        self._w[0] = 0.0

    async def warm_start(self, prompts: Sequence[Prompt]) -> Mapping[str, float]:
        """Move w[1] by the number of prompts."""
        self._started[1] += len(prompts)
        return {"loss": 0.0}

    async def forward_backward(self, groups: Sequence[RolloutGroup]) -> GradientReport:
        """Take the scripted time; the weights stay as they are."""
        self.specs()  # raises where there is nothing to train
        if self._gradient is not None:
            msg = "gradients are waiting: call optimizer_step or skip_step first"
            raise RuntimeError(msg)
        rewards = [each[0].reward for group in groups for each in group.trained_trajectories]
        if not rewards:
            msg = "a batch has at least one token that is trained"
            raise ValueError(msg)
        await asyncio.sleep(self._forward_backward_s)
        self.num_batches += 1
        finite = self.num_batches not in self._bad_gradients
        self._gradient = float(np.mean(rewards)) if finite else math.nan
        return GradientReport(finite, {"loss": -self._gradient})

    async def optimizer_step(self) -> StepReport:
        """Change the weights, unless the script refuses."""
        if self._gradient is None:
            msg = "there are no gradients: call forward_backward first"
            raise RuntimeError(msg)
        await asyncio.sleep(self._optimizer_s)
        gradient, self._gradient = self._gradient, None
        applied = math.isfinite(gradient) and self.num_batches not in self._bad_steps
        if applied:
            self._started[:2] += (1.0, gradient)
        return StepReport(applied, {"grad_norm": abs(gradient), "lr": 1.0})

    async def skip_step(self) -> None:
        """Throw the gradient away."""
        self._gradient = None

    def specs(self) -> Sequence[TensorSpec]:
        """Describe "w"."""
        return (TensorSpec(NAME, "float32", self._started.shape),)

    def read(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        """Return "w", without a copy, as often as it is named."""
        import torch

        tensors = {NAME: torch.from_numpy(self._started)}
        return [tensors[name] for name in names]

    async def probe(self, seed: int) -> WeightProbe | None:
        """There is no model."""
        return None

    async def begin_save(self, directory: Path) -> None:
        """Write "w" at once."""
        _write(directory, {NAME: self._started.tolist()}, new=False)

    async def written(self) -> None:
        """It is written."""

    async def end_save(self) -> None:
        """It is written."""

    async def restore(self, directory: Path) -> None:
        """Read "w"."""
        self._started[:] = _read(directory)[NAME]

    async def export(self, path: Path) -> None:
        """Write "w" as JSON into a new directory."""
        _write(path, {NAME: self._started.tolist()}, new=True)

    async def close(self) -> None:
        """Forget the weights."""
        self._w = None

    @property
    def _started(self) -> npt.NDArray[np.float32]:
        if self._w is None:
            msg = "the training backend is not started, or it is closed"
            raise RuntimeError(msg)
        return self._w


def _write(path: Path, weights: Mapping[str, Sequence[float]], *, new: bool) -> None:
    if new:
        path.mkdir(parents=True)
    (path / _FILE).write_text(json.dumps(weights))


def _read(path: Path) -> dict[str, list[float]]:
    weights: dict[str, list[float]] = json.loads((path / _FILE).read_text())
    return weights
