"""All sections together, and what must hold between them. Pure; waits for nothing."""

from __future__ import annotations

import math
from typing import Annotated, Self

import tomli_w
from pydantic import Field, model_validator

from ratchet.config.buffer import BufferConfig
from ratchet.config.model import ModelConfig
from ratchet.config.rollout import EvalConfig, RolloutConfig
from ratchet.config.runtime import RuntimeConfig
from ratchet.config.section import Section
from ratchet.config.task import TaskConfig
from ratchet.config.training import (
    AlgorithmConfig,
    CheckpointConfig,
    TrainerConfig,
    WarmStartConfig,
    WeightsConfig,
)
from ratchet.config.transfer import DIRECT, transfer_of

_LEAST_ROLLOUT_BYTES = 13
"""A prompt of one token (4), and a completion of one: its id, its logprob, its mask (4 + 4 + 1)."""


class Config(Section):
    """A whole run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    seed: Annotated[int, Field(ge=0, le=2**53)] = 0
    model: ModelConfig
    task: TaskConfig
    rollout: RolloutConfig
    buffer: BufferConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    trainer: TrainerConfig
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="after")
    def _one_reward(self) -> Self:
        if self.rollout.group_size == 1 and self.algorithm.advantage == "std":
            msg = (
                'rollout.group_size = 1 cannot go with algorithm.advantage = "std": one reward has'
                " no standard deviation; use a group_size of at least 2"
            )
            raise ValueError(msg)
        if self.rollout.group_size == 1 and "zero_spread" in self.buffer.filters:
            msg = (
                'rollout.group_size = 1 cannot go with "zero_spread" in buffer.filters: one reward'
                " has no spread, so every group would be dropped; leave one of the two out"
            )
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _room(self) -> Self:
        if self.buffer.capacity < self.buffer.batch_groups:
            msg = (
                "floor(buffer.capacity_factor x buffer.batch_groups) ="
                f" floor({self.buffer.capacity_factor} x {self.buffer.batch_groups}) ="
                f" {self.buffer.capacity} groups can never hold a batch of"
                f" {self.buffer.batch_groups}; use a capacity_factor of at least 1"
            )
            raise ValueError(msg)
        if self.buffer.custom is not None and self.buffer.admission == "bounded":
            msg = (
                f'buffer.custom = {self.buffer.custom!r} cannot go with admission = "bounded": that'
                " nothing gets too old is proved of its own order of training; use admission ="
                ' "capacity"'
            )
            raise ValueError(msg)
        least = self._least_batch_bytes
        if self.buffer.max_bytes is not None and self.buffer.max_bytes < least:
            msg = (
                f"buffer.max_bytes = {self.buffer.max_bytes} is less than buffer.batch_groups x"
                f" rollout.group_size x {_LEAST_ROLLOUT_BYTES} = {self.buffer.batch_groups} x"
                f" {self.rollout.group_size} x {_LEAST_ROLLOUT_BYTES} = {least} bytes, a batch of"
                " completions of one token: it can never hold one; use a multiple of that, or"
                " leave it out"
            )
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _times(self) -> Self:
        if self.rollout.group_timeout_s > self.buffer.lease_s:
            msg = (
                f"rollout.group_timeout_s = {self.rollout.group_timeout_s} is longer than"
                f" buffer.lease_s = {self.buffer.lease_s}: the lease would end first"
            )
            raise ValueError(msg)
        least_s = self.eval.timeout_s + self.rollout.group_timeout_s
        if (
            self.eval.every_steps
            and self.eval.engines == "shared"
            and self.trainer.batch_timeout_s < least_s
        ):
            msg = (
                f"eval.timeout_s + rollout.group_timeout_s = {least_s} is longer than"
                f" trainer.batch_timeout_s = {self.trainer.batch_timeout_s}: an evaluation that"
                " hangs on shared engines would end the run; lower eval.timeout_s, or use engines ="
                ' "own"'
            )
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _submission(self) -> Self:
        room = self.most_open_groups
        slots = self.groups_per_worker * self.rollout.num_workers
        if self.rollout.submission == "sample" and slots >= room:
            msg = (
                'rollout.submission = "sample" would change nothing: the workers have slots for'
                f" {self.groups_per_worker} x {self.rollout.num_workers} = {slots} groups"
                f" (rollout.max_concurrent_groups x num_workers), and the buffer has room for"
                f" {room}, so that no further group can begin while one waits for its last sample;"
                " use fewer max_concurrent_groups, a larger buffer.capacity_factor, or"
                ' submission = "group"'
            )
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _transfer(self) -> Self:
        transfer_of(self.rollout, self.weights, lora=self.model.lora is not None)
        return self

    @property
    def effective_weights(self) -> WeightsConfig:
        """The section `weights` as both ends of a transfer read it: where SGLang's servers take
        weights from the trainer itself, that is their transport.
        """
        transfer = transfer_of(self.rollout, self.weights, lora=self.model.lora is not None)
        if transfer != DIRECT:
            return self.weights
        return self.weights.model_copy(update={"transport": DIRECT})

    @property
    def most_open_groups(self) -> int:
        """Groups that are ever finished or in flight at once."""
        if self.trainer.synchronous:
            return self.buffer.batch_groups
        if self.buffer.admission == "bounded":
            within = self.buffer.batch_groups * (self.buffer.max_staleness + 1)
            return min(self.buffer.capacity, within)
        return self.buffer.capacity

    @property
    def _least_batch_bytes(self) -> int:
        return self.buffer.batch_groups * self.rollout.group_size * _LEAST_ROLLOUT_BYTES

    @property
    def groups_per_worker(self) -> int:
        """Groups that one rollout worker has slots for."""
        if self.rollout.max_concurrent_groups is not None:
            return self.rollout.max_concurrent_groups
        per_sample = self.rollout.submission == "sample"
        groups = self.buffer.batch_groups if per_sample else self.buffer.capacity
        return max(1, math.ceil(groups / self.rollout.num_workers))

    @property
    def num_evaluators(self) -> int:
        """Workers that only evaluate, of those that `ratchet run` starts."""
        own = self.eval.every_steps and self.eval.engines == "own"
        return self.eval.num_workers if own else 0

    @property
    def needs_probe(self) -> bool:
        """Whether engines prove by what they compute that a load went well: SGLang's weights cannot
        be read back.
        """
        return self.weights.verify and self.rollout.backend == "sglang"

    def to_toml(self) -> str:
        """Return the resolved configuration: every field, defaults included."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))
