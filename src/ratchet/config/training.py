"""The sections of training: its algorithm, optimiser, checkpoints and weight sync. Pure; waits
for nothing.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from ratchet.config.section import BelowOne, NonNegative, Positive, PositiveFloat, Section


class AlgorithmConfig(Section):
    """GRPO (arXiv:2402.03300), clip-higher (arXiv:2503.14476), truncated importance sampling."""

    name: str = "grpo"
    advantage: str = "std"
    """ "std" | "mean" | "module:function": rewards centred by the group's mean, and for "std"
    divided by its standard deviation."""
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.28
    importance_cap: PositiveFloat = 2.0
    """Cap of the truncated importance weight between behavior and proximal policy."""
    entropy_coef: float = 0.0


class WarmStartConfig(Section):
    """SFT on the task's references before version 0."""

    steps: NonNegative = 0
    batch_size: Positive = 64
    lr: PositiveFloat = 1e-3
    lr_warmup_steps: NonNegative = 20


class TrainerConfig(Section):
    """Optimisation."""

    backend: str = "fsdp"
    num_steps: Positive
    lr: PositiveFloat = 1e-4
    lr_warmup_steps: NonNegative = 20
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: PositiveFloat = 1.0
    micro_batch_tokens: Positive = 65536
    """Padded tokens of one forward pass; larger batches are split, with the same gradient."""
    max_bad_steps: Positive = 3
    """Non-finite steps in a row that end the run."""
    synchronous: bool = False
    """Generate, train, publish strictly one after another: the baseline to measure against."""
    batch_timeout_s: PositiveFloat = 300.0
    """The run fails when no batch comes for so long."""
    ranks_per_node: Positive = 1
    """Processes of a node that share the model in training (FSDP2); one per GPU."""


class WeightsConfig(Section):
    """Weight sync."""

    transport: str = "broadcast"
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    bucket_mib: PositiveFloat = 64.0
    staging_mib: PositiveFloat = 1024.0
    """Memory (the device's, with NCCL) that an engine may use beside its model, at least two
    buckets: weights of up to this size are received and verified as a whole before the engine
    pauses. Larger ones are written while the rest arrives.
    """
    pause_mode: Literal["in_place", "retract"] = "in_place"
    timeout_s: PositiveFloat = 60.0
    shared_memory: bool = True
    """Engines on the trainer's own host take buckets from memory that they share with it, from
    their second version on; where that cannot be, and with NCCL, they go as the others do.
    """
    verify: bool = True
    """After loading, read the engine's own parameters back and compare their digest with the
    trainer's.
    """
    snapshot: bool = False
    """Send from a copy of the weights in host memory (two while a version travels that is not the
    newest): then no optimiser step waits for a transfer.
    """

    @field_validator("pause_mode", mode="before")
    @classmethod
    def _no_abort(cls, value: object) -> object:
        if value == "abort":
            msg = (
                'pause_mode "abort" is refused: generation is always in flight here, so every sync'
                ' would throw work away; use "in_place" (keep the cache) or "retract" (compute it'
                " again)"
            )
            raise ValueError(msg)
        return value


class CheckpointConfig(Section):
    """All that training goes on from, written beside it."""

    every_steps: NonNegative = 50
    """0 writes none. There is one more after the last step."""
    keep: Positive = 2
    """The newest ones stay."""
