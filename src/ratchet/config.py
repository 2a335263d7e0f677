"""The configuration of a run: typed, frozen, validated; one TOML file in, one resolved TOML file
out.

Consumes a TOML file and `a.b=c` overrides, produces a `Config` or a `ConfigError` that names each
field, its value and the way out. Waits for nothing. The validators here need no heavy import; what
needs a tokenizer or a task (a prompt longer than the context, a task that does not import) is
checked by `runtime.prepare` before anything is written.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ratchet.errors import ConfigError

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
FilterName = Literal["zero_spread", "too_short", "too_long", "truncated", "any_aborted"]
UnusedName = Literal["drop", "retry", "mask"]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]

_LEAST_ROLLOUT_BYTES = 13
"""A prompt of one token (4), and a completion of one: its id, its logprob, its mask (4 + 4 + 1)."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def _check_choice(choice: str, known: Sequence[str]) -> str:
    if choice not in known and ":" not in choice:
        msg = (
            f"{choice!r} is not known; use one of {', '.join(known)}, or"
            ' "module:function" to bring your own'
        )
        raise ValueError(msg)
    return choice


class LoraConfig(_Section):
    """A LoRA adapter (arXiv:2106.09685): it alone is trained and travels; the base model stays as
    it is. With this section, even an empty one, it is on.
    """

    rank: Positive = 16
    alpha: Positive = 32
    """The adapter adds alpha / rank x B A to each weight."""
    dropout: float = 0.0
    """Only 0: see the error."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names of linear modules, or the ends of names ("q_proj"), or every linear module but the
    output layer.
    """
    export_merged: bool = False
    """Beside the adapter, export the base model with the adapter merged in, as `merged`."""

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, value: float) -> float:
        if value != 0.0:
            msg = (
                f"dropout = {value} is refused: the trainer must compute the very probabilities"
                " that the engines sampled with, and engines generate without dropout; use 0"
            )
            raise ValueError(msg)
        return value

    @field_validator("target_modules", mode="before")
    @classmethod
    def _some_targets(cls, value: object) -> object:
        if value == "all-linear":
            return value
        if (
            isinstance(value, list | tuple)
            and value
            and all(isinstance(name, str) and name for name in value)
        ):
            return tuple(value)
        msg = (
            f'{value!r} is neither "all-linear" nor a list of names of linear modules, such as'
            ' ["q_proj", "v_proj"]'
        )
        raise ValueError(msg)


class ModelConfig(_Section):
    """The policy: a local Hugging Face directory, or a fresh model from a config."""

    path: str | None = None
    """A local directory with config, weights and tokenizer."""
    build: dict[str, Any] | None = None
    """Hugging Face config of a fresh model with random weights, `model_type` included."""
    tokenizer_chars: str | None = None
    """With `build`: a tokenizer of one token per character of this string (pad, eos and unk are
    added).
    """
    chat_template: bool = False
    """Wrap each prompt as a user message with the tokenizer's chat template."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora: LoraConfig | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.build is None):
            msg = (
                "give exactly one of model.path (a local directory) and model.build (a fresh model)"
            )
            raise ValueError(msg)
        if self.build is not None and self.tokenizer_chars is None:
            msg = "model.build needs model.tokenizer_chars"
            raise ValueError(msg)
        if self.build is not None and "model_type" not in self.build:
            msg = 'model.build needs a model_type, for example "qwen3"'
            raise ValueError(msg)
        return self


class OneTaskConfig(_Section):
    """One task of a mixture."""

    name: str
    """A built-in task, or "module:object" (the module may be a path to a .py file)."""
    args: dict[str, Any] = {}
    reward: str | None = None
    """ "module:function" that replaces the task's own score."""
    label: str | None = None
    """What its prompts' ids begin with; by default the name, or what follows its colon."""
    weight: PositiveFloat = 1.0
    """Its share of the prompts, compared with the other weights."""

    @property
    def key(self) -> str:
        """The label, given or not."""
        return self.label or self.name.rpartition(":")[2]

    @model_validator(mode="after")
    def _one_word(self) -> Self:
        if self.name == "mixture":
            msg = 'name = "mixture" is refused: put its tasks beside the others'
            raise ValueError(msg)
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", self.key):
            msg = (
                f"label = {self.key!r} is not a word of letters, digits, '.', '_' and '-'; give"
                " another one"
            )
            raise ValueError(msg)
        return self


class TaskConfig(_Section):
    """Where prompts and rewards come from."""

    name: str = "mixture"
    """A built-in task, or "module:object" (the module may be a path to a .py file); "mixture" is
    for `tasks`.
    """
    args: dict[str, Any] = {}
    reward: str | None = None
    """ "module:function" that replaces the task's own score."""
    tasks: tuple[OneTaskConfig, ...] = ()
    """Several tasks at once, weighted."""
    reward_isolation: Literal["auto", "process", "thread"] = "auto"
    """Where rewards run: in processes that can be killed, or in threads of the rollout worker.
    "auto" is threads where the score is Ratchet's own and compares text, and in a run in one
    process (`in_process`); else it is processes.
    """
    reward_workers: Positive = 2
    """Processes or threads per rollout worker; each scores one group at a time."""
    reward_timeout_s: PositiveFloat = 30.0
    """For one completion; a process that takes longer is killed, and its group fails. A thread is
    held to `rollout.group_timeout_s` alone.
    """
    reward_max_mib: Positive = 4096
    """Address space of a reward process."""
    reward_env: tuple[str, ...] = ()
    """Environment variables that rewards see beside PATH, HOME, locale, PYTHON* and the like; a key
    that a reward needs is named here.
    """
    fingerprint: str | None = None
    """Digest of the training prompts, filled in when a run starts. A run whose configuration has it
    trains on these prompts and on no others; "" is for any.
    """

    @property
    def weights(self) -> dict[str, float]:
        """Weights of a mixture by label; empty for one task."""
        return {task.key: task.weight for task in self.tasks}

    @model_validator(mode="after")
    def _one_or_several(self) -> Self:
        if (self.name == "mixture") != bool(self.tasks) or (self.tasks and self.args):
            msg = (
                "give either name and args (one task), or one [[task.tasks]] for each of several,"
                " with name, args and weight"
            )
            raise ValueError(msg)
        if len(self.weights) < len(self.tasks):
            labels = [task.key for task in self.tasks]
            twice = next(label for label in labels if labels.count(label) > 1)
            msg = f"two of tasks have the label {twice!r}; give them labels of their own"
            raise ValueError(msg)
        return self


class RolloutConfig(_Section):
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


class BufferConfig(_Section):
    """Admission, staleness and batches."""

    batch_groups: Positive
    """Groups that one optimiser step trains."""
    capacity_factor: PositiveFloat = 2.0
    """Finished and in-flight groups together are at most floor(capacity_factor x batch_groups)."""
    max_bytes: Positive | None = None
    """No prompt is issued while the arrays of the finished groups, and as much again for each group
    in flight as the largest so far, exceed this; one batch is always let in.
    """
    max_staleness: NonNegative = 4
    admission: Literal["capacity", "bounded"] = "capacity"
    """ "capacity": issue prompts while there is room; what gets too old goes to the unused handler.
    "bounded": issue only what is sure to be trained within `max_staleness`.
    """
    custom: str | None = None
    """ "module:Class" that chooses the groups of a batch in place of first in, first out; see
    `ratchet.actors.buffer_policy`.
    """
    filters: tuple[str, ...] = ()
    """Finished groups that one of these rejects are dropped; the first to reject is the reason.
    "zero_spread": all rewards are equal, so there is no gradient. "too_short", "too_long": a
    rollout has fewer completion tokens than `min_tokens`, more than `max_tokens`. "truncated": a
    rollout was cut off at its length limit. "any_aborted": a rollout was aborted, or failed. Or
    "module:function" (group -> bool, True keeps it).
    """
    min_tokens: Positive | None = None
    max_tokens: Positive | None = None
    unused: str = "drop"
    """What happens to aborted, failed and stale groups: "drop"; "retry": issue the prompt again, up
    to `max_retries` times; "mask": train what is left of them; or "module:function"
    (UnusedGroup -> one of the three).
    """
    max_retries: NonNegative = 1
    """Times that the unused handler issues a group again, whichever handler it is."""
    max_reissues: NonNegative = 3
    """Times that a group is issued again because its worker died or let the lease end."""
    batch_filter: str | None = None
    """ "module:function" (groups of a batch -> for each a list of bools, one per rollout): the
    trainer leaves the rollouts with a True out of its step.
    """
    lease_s: PositiveFloat = 180.0

    @field_validator("filters")
    @classmethod
    def _known_filters(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for index, name in enumerate(value):
            _check_choice(name, get_args(FilterName))
            if name in value[:index]:
                msg = f"{name!r} is named twice; once is enough"
                raise ValueError(msg)
        return value

    @field_validator("unused")
    @classmethod
    def _known_handler(cls, value: str) -> str:
        return _check_choice(value, get_args(UnusedName))

    @field_validator("batch_filter")
    @classmethod
    def _own_function(cls, value: str | None) -> str | None:
        if value is not None and ":" not in value:
            msg = f'{value!r} is not of the form "module:function"'
            raise ValueError(msg)
        return value

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        for name, field in (("too_short", "min_tokens"), ("too_long", "max_tokens")):
            limit = getattr(self, field)
            if (name in self.filters) != (limit is not None):
                is_listed = "is" if name in self.filters else "is not"
                msg = (
                    f"buffer.{field} = {limit}, and {name!r} {is_listed} in buffer.filters ="
                    f" {list(self.filters)}: give both or neither"
                )
                raise ValueError(msg)
        if self.min_tokens and self.max_tokens and self.min_tokens > self.max_tokens:
            msg = (
                f"buffer.min_tokens = {self.min_tokens} is more than buffer.max_tokens ="
                f" {self.max_tokens}: every group would be dropped"
            )
            raise ValueError(msg)
        return self

    @property
    def masks_stale(self) -> bool:
        """Whether a batch may hold tokens past the bound, for the trainer to mask."""
        return self.unused not in {"drop", "retry"}

    @property
    def capacity(self) -> int:
        """Groups that may be finished or in flight at once."""
        return math.floor(self.capacity_factor * self.batch_groups)


class AlgorithmConfig(_Section):
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


class WarmStartConfig(_Section):
    """SFT on the task's references before version 0."""

    steps: NonNegative = 0
    batch_size: Positive = 64
    lr: PositiveFloat = 1e-3
    lr_warmup_steps: NonNegative = 20


class TrainerConfig(_Section):
    """Optimisation."""

    backend: str = "fsdp"
    num_steps: Positive
    lr: PositiveFloat = 1e-4
    lr_warmup_steps: NonNegative = 20
    betas: tuple[float, float] = (0.9, 0.95)
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


class WeightsConfig(_Section):
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


class EvalConfig(_Section):
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


class CheckpointConfig(_Section):
    """All that training goes on from, written beside it."""

    every_steps: NonNegative = 50
    """0 writes none. There is one more after the last step."""
    keep: Positive = 2
    """The newest ones stay."""


class TlsConfig(_Section):
    """Mutual TLS between hosts: every node shows a certificate that the run's own authority has
    signed. All three are PEM files.
    """

    ca: str
    """certificate of the run's authority; nothing else is trusted"""
    cert: str
    """this node's certificate"""
    key: str
    """this node's private key, of mode 0600"""


class RuntimeConfig(_Section):
    """Processes, addresses and supervision."""

    host: str = "127.0.0.1"
    """IP address of this machine that roles listen on; never a wildcard."""
    token_file: str | None = None
    """A file of mode 0600 with the secret of the run; every node has a copy."""
    tls: TlsConfig | None = None
    threads: Positive = 1
    """torch threads of each engine and trainer process."""
    restart_strategy: Literal["one_for_one", "one_for_all", "rest_for_one"] = "one_for_one"
    """Which rollout workers start again when one dies: it alone, all, or it and the later ones."""
    max_restarts: NonNegative = 3
    """Restarts of dead rollout workers, all of this launcher together, within any
    `restart_window_s`; one more ends its launcher, and the run if that is the launcher of the whole
    run.
    """
    restart_window_s: PositiveFloat = 60.0
    backoff_first_s: NonNegativeFloat = 0.0
    """Pause before a worker's restart; it doubles with each further one until the worker has lived
    for `restart_window_s`.
    """
    backoff_most_s: NonNegativeFloat = 10.0
    heartbeat_s: PositiveFloat = 1.0
    """Each link and each role says so often that it responds."""
    suspect_s: PositiveFloat = 5.0
    """Silence of a role after which it is suspected."""
    dead_s: PositiveFloat = 15.0
    """Silence of a role after which it counts as dead."""
    ask_timeout_s: PositiveFloat = 30.0

    @field_validator("host")
    @classmethod
    def _one_address(cls, value: str) -> str:
        if value == "localhost":
            return "127.0.0.1"
        try:
            address = ipaddress.ip_address(value)
        except ValueError:
            msg = f"{value!r} is not an IP address of this machine, such as 127.0.0.1"
            raise ValueError(msg) from None
        if address.is_unspecified:
            msg = f"{value!r} is every interface of this machine; name the one that others reach"
            raise ValueError(msg)
        return value

    @model_validator(mode="after")
    def _safe(self) -> Self:
        if not ipaddress.ip_address(self.host).is_loopback and not (self.token_file or self.tls):
            msg = (
                f"runtime.host = {self.host!r} can be reached from other machines, and nothing"
                " keeps strangers out: give runtime.token_file (a secret file of mode 0600, the"
                " same on every node) or runtime.tls (ca, cert, key), or use 127.0.0.1"
            )
            raise ValueError(msg)
        if not self.heartbeat_s < self.suspect_s < self.dead_s:
            msg = (
                f"runtime.heartbeat_s = {self.heartbeat_s}, suspect_s = {self.suspect_s} and"
                f" dead_s = {self.dead_s} must grow in this order"
            )
            raise ValueError(msg)
        if self.ask_timeout_s < self.dead_s:
            msg = (
                f"runtime.ask_timeout_s = {self.ask_timeout_s} is shorter than runtime.dead_s ="
                f" {self.dead_s}: an ask would fail before anybody knows whether its receiver lives"
            )
            raise ValueError(msg)
        return self


class Config(_Section):
    """A whole run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    seed: NonNegative = 0
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
    def _consistent(self) -> Self:
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
                " nothing gets too old is proved of batches first in, first out; use admission ="
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

    def to_toml(self) -> str:
        """Return the resolved configuration: every field, defaults included."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read and validate a TOML file; the name defaults to the file's stem.

    Args:
        path: the file.
        overrides: "section.key=value", where the value is TOML, or a bare string.

    Raises:
        ConfigError: if the file is missing, is not TOML, or breaks a rule; the text names each
        field.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        msg = f"cannot read the configuration {path}: {error.strerror}"
        raise ConfigError(msg) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        msg = f"{path} is not valid TOML: {error}"
        raise ConfigError(msg) from None
    data.setdefault("name", path.stem)
    for override in overrides:
        _apply(data, override)
    return parse_config(data, source=str(path))


def parse_config(data: Mapping[str, Any], source: str = "configuration") -> Config:
    """Validate plain data.

    Raises:
        ConfigError: with one line per problem.
    """
    try:
        return Config.model_validate_json(_json(data, source))
    except ValidationError as error:
        lines = [_explain(details) for details in error.errors(include_url=False)]
        msg = f"{source}: " + ("; ".join(lines) if len(lines) == 1 else "\n  " + "\n  ".join(lines))
        raise ConfigError(msg) from None


def _json(data: Mapping[str, Any], source: str) -> bytes:
    # JSON mode of pydantic is strict about types and still takes an array for a tuple
    import msgspec

    try:
        return msgspec.json.encode(data)
    except TypeError as error:
        msg = f"{source}: {error}"
        raise ConfigError(msg) from None


def _apply(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        msg = f"--set {override!r} is not of the form section.key=value"
        raise ConfigError(msg)
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    node = data
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            msg = f"--set {override!r}: {part} is a value, not a section"
            raise ConfigError(msg)
        node = child
    node[parts[-1]] = value


def _explain(details: Mapping[str, Any]) -> str:
    location = [str(part) for part in details["loc"]]
    field = ".".join(location)
    if details["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
        close = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
        return f"unknown key {field!r}; {hint}"
    if details["type"] == "missing":
        return f"{field} is missing"
    text = str(details["msg"]).removeprefix("Value error, ")
    if details["type"] == "value_error":
        return f"{field}: {text}" if field else text
    return f"{field} = {details['input']!r}: {text}"


def _known_keys(location: Sequence[str]) -> list[str]:
    model: type[BaseModel] = Config
    for part in location:
        if part.isdigit():  # the n-th of an array of tables
            continue
        annotation = model.model_fields[part].annotation
        choices = get_args(annotation) or (annotation,)  # a section may be optional
        section = next((each for each in choices if _is_section(each)), None)
        if section is None:
            return []
        model = section
    return sorted(model.model_fields)


def _is_section(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
