"""The protocol of a training backend: a model, an optimiser, and the numbers of a step.

A backend consumes batches with advantages, produces new weights and metrics, and waits for nothing
but its own ranks. A step has two halves, because the weights may still be travelling to the engines
while the first one computes: `forward_backward` leaves them as they are, `optimizer_step` changes
them. Blocking work runs on threads of its own, never on the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from ratchet.transport.weights.base import WeightSource
from ratchet.types import Prompt, RolloutGroup, WeightProbe


class GradientReport(NamedTuple):
    """What a forward and backward pass found, over the whole batch."""

    finite: bool
    """False if loss or gradients are not finite: the step must be skipped"""
    metrics: Mapping[str, float]
    """loss, entropy, importance ratio, clip shares, ..."""


class StepReport(NamedTuple):
    """What an optimiser step did."""

    applied: bool
    """False if the gradient norm or the new weights were not finite: nothing changed"""
    metrics: Mapping[str, float]
    """grad_norm, lr"""


class TrainingBackend(WeightSource, Protocol):
    """The model in training, owned by one TrainerActor."""

    async def start(self) -> None:
        """Load the base model."""
        ...

    async def warm_start(self, prompts: Sequence[Prompt]) -> Mapping[str, float]:
        """Train on the prompts' references (SFT) as configured; returns the last loss as `loss`."""
        ...

    async def forward_backward(self, groups: Sequence[RolloutGroup]) -> GradientReport:
        """Compute the gradients of the configured loss; the weights stay as they are.

        Of a group those tokens are trained, and count, that `loss_mask` selects; a group may have
        none, but not all of them.
        """
        ...

    async def optimizer_step(self) -> StepReport:
        """Clip, apply, and zero the gradients; counts towards the learning-rate schedule only if
        applied.
        """
        ...

    async def skip_step(self) -> None:
        """Throw the gradients away."""
        ...

    async def probe(self, seed: int) -> WeightProbe | None:
        """Compute what the weights as they are make of token ids from this seed; None if this
        backend has no model that engines run.
        """
        ...

    async def begin_save(self, directory: Path) -> None:
        """Copy all that training goes on from (model, optimiser, schedule, random numbers), and
        write it while the next steps are taken. The directory is there, on every rank's machine the
        same.
        """
        ...

    async def written(self) -> None:
        """Wait until this rank has written, or could not; others may train meanwhile."""
        ...

    async def end_save(self) -> None:
        """Wait until every rank has written; after `written` that is soon.

        Raises:
            OSError: if one of them could not.
        """
        ...

    async def restore(self, directory: Path) -> None:
        """Go on from a saved state, of any number of ranks, instead of the base model."""
        ...

    async def export(self, path: Path) -> None:
        """Write model, config and tokenizer as Hugging Face safetensors into a new directory."""
        ...

    async def close(self) -> None:
        """Free everything."""
        ...
