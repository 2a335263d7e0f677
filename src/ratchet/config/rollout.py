"""The sections [rollout] and [eval]: generation. Pure; waits for nothing."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ratchet.config.section import NonNegative, Positive, PositiveFloat, Section
from ratchet.config.sglang import SGLangConfig


class RolloutConfig(Section):
    """Generation."""

    backend: str = "torch"
    num_workers: Positive = 1
    group_size: Positive = 8
    max_concurrent_groups: Positive | None = None
    """Groups whose samples a worker has in flight at once. By default the buffer's capacity, and
    with submission = "sample" a batch, divided by the workers."""
    submission: Literal["group", "sample"] = "group"
    """When a worker takes another group: when one has ended, or as soon as so many single samples
    have; then long samples do not leave an engine idle, and more groups are in flight: at most
    `max_concurrent_groups` x `group_size` per worker, and never more than the buffer's capacity."""
    max_batch_size: Positive = 512
    """Sequences that one engine decodes at once."""
    max_tokens: Positive
    temperature: PositiveFloat = 1.0
    group_timeout_s: PositiveFloat = 120.0
    """A group that takes longer fails; it is at most the buffer's lease."""
    sglang: SGLangConfig = SGLangConfig()
    """Read with backend = "sglang" only."""


class EvalConfig(Section):
    """Evaluation on held-out prompts before, beside and after training, each of one version."""

    num_prompts: NonNegative = 0
    every_steps: NonNegative = 0
    """Beside training, evaluate the version of each so many optimiser steps; 0 is never."""
    engines: Literal["shared", "own"] = "shared"
    """Who evaluates: "shared" lends at most half of the rollout workers (or the only one), "own"
    starts `num_workers` that do nothing else.
    """
    num_workers: Positive = 1
    """With "own": how many `ratchet run` starts."""
    samples: Positive = 1
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy."""
    timeout_s: PositiveFloat = 120.0
    """An evaluation that takes longer ends, and counts the prompts that it lacks as failed."""

    @model_validator(mode="after")
    def _has_prompts(self) -> Self:
        if self.every_steps and not self.num_prompts:
            msg = (
                f"eval.every_steps = {self.every_steps} has nothing to evaluate: eval.num_prompts"
                " is 0; set it, or leave every_steps out"
            )
            raise ValueError(msg)
        return self
