"""What is checked before a run is started or a file written: the task, its prompts, the model,
what keeps strangers out.

Consumes a `Config`, produces the task or a `UserError`; waits for the disk only. It runs in the
launcher, which stays light: torch is not loaded, and transformers only for a model from a
directory.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, get_args

from ratchet.actors.buffer_policy import Policy
from ratchet.actors.verdicts import Verdicts
from ratchet.algorithms.registry import ADVANTAGES, LOSSES
from ratchet.backends.rollout.sglang.answers import kept_tokens
from ratchet.config import Config, ModelConfig
from ratchet.errors import ConfigError, TaskError, UserError
from ratchet.imports import check_choice
from ratchet.runtime.batch_filter import load_batch_filter
from ratchet.runtime.compose import ENGINES, TRAINERS, warm_start_prompts
from ratchet.tasks.base import Split, Task
from ratchet.tasks.problems import check_task, fingerprint
from ratchet.tasks.registry import Reward, build_task
from ratchet.transport.mailbox.credentials import open_credentials
from ratchet.transport.weights.registry import TRANSPORTS
from ratchet.types import Prompt, RoleKind

_MAX_CHECKED: Final = 20_000
"""Prompts of a split that are checked; a longer prompt behind them fails as a group, and is
counted.
"""

_NO_TEMPLATE: Final = (
    "model.chat_template = true, and the tokenizer of the model has no chat template: set it to"
    " false, or give a model.path whose tokenizer has one"
)


def check_run(config: Config, reward: Reward | None = None) -> Task:
    """Check everything that a configuration refers to.

    Args:
        config: of the run.
        reward: in the place of what `task.reward` names, where all is in one process.

    Raises:
        TaskError: if the task does not load or has too few prompts.
        ConfigError: if the model, the token or a certificate is not there, or a prompt does not
            fit into the model.
    """
    _check_buffer(config)
    load_batch_filter(config.buffer)
    return _check_learner(config, reward)


def _check_learner(config: Config, reward: Reward | None = None) -> Task:
    """Check all but what the buffer alone needs."""
    _check_names(config)
    check_credentials(config)
    _check_lora(config.model)
    _check_sglang(config)
    context = _context_tokens(config.model)
    task = build_task(config.task, config.seed, reward)
    _check_counts(config, task)
    _check_references(config, task)
    _check_prompts(config, task, context)
    return task


def with_fingerprint(config: Config, task: Task) -> Config:
    """Return the configuration with the fingerprint of its training prompts filled in."""
    found = fingerprint(task.prompts("train"))
    task_config = config.task.model_copy(update={"fingerprint": found})
    return config.model_copy(update={"task": task_config})


def check_role(kind: RoleKind, config: Config) -> None:
    """Check what one role of a run needs on its node. A registry and a buffer need no model.

    Raises:
        TaskError: if the task does not load or has too few prompts.
        ConfigError: if something else is missing here.
    """
    if kind == "trainer":
        load_batch_filter(config.buffer)
    if kind not in {"registry", "buffer"}:
        _check_learner(config)
        return
    _check_names(config)
    check_credentials(config)
    if kind == "buffer":
        _check_buffer(config)
        _check_counts(config, build_task(config.task, config.seed))


def _check_buffer(config: Config) -> None:
    """Import what the user has named there."""
    Verdicts(config.buffer)
    Policy.load(config.buffer)


def _check_names(config: Config) -> None:
    check_choice("rollout.backend", config.rollout.backend, ENGINES)
    check_choice("trainer.backend", config.trainer.backend, TRAINERS)
    check_choice("weights.transport", config.weights.transport, TRANSPORTS)
    check_choice("algorithm.name", config.algorithm.name, LOSSES)
    check_choice("algorithm.advantage", config.algorithm.advantage, ADVANTAGES)


def _check_sglang(config: Config) -> None:
    if config.rollout.backend != "sglang":
        return
    if importlib.util.find_spec("aiohttp") is None:
        msg = (
            'rollout.backend = "sglang" needs the package aiohttp, which is not installed: install'
            " ratchet-rl[sglang], or use another backend"
        )
        raise ConfigError(msg)
    num_workers = config.rollout.num_workers + config.num_evaluators
    if config.rollout.sglang.attaches and num_workers > 1:
        msg = (
            "rollout.sglang.servers and router go with one worker, and rollout.num_workers with"
            f' eval.engines = "own" makes {num_workers}: each would pause and update the servers of'
            " the others; use one, or let each worker launch a server"
        )
        raise ConfigError(msg)


def _check_lora(model: ModelConfig) -> None:
    if model.lora is not None and importlib.util.find_spec("peft") is None:
        msg = (
            "[model.lora] needs the package peft, which is not installed: install"
            " ratchet-rl[lora], or leave the section out"
        )
        raise ConfigError(msg)


def check_credentials(config: Config) -> None:
    """Open what keeps strangers out, if the configuration names it.

    Raises:
        ConfigError: if it cannot be used.
    """
    if config.runtime.token_file is not None or config.runtime.tls is not None:
        open_credentials(config.runtime.token_file, config.runtime.tls)


def _check_splits(config: Config, task: Task) -> None:
    """Call what is the user's own, perhaps, for the first time."""
    for split in get_args(Split):
        call = f"task {config.task.name!r}: prompts({split!r})"
        try:
            prompts: object = task.prompts(split)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            msg = f"{call} failed: {type(error).__name__}: {error}"
            raise TaskError(msg) from error
        if not isinstance(prompts, Sequence):
            msg = f"{call} is no sequence, but {prompts!r}"
            raise TaskError(msg)


def _check_counts(config: Config, task: Task) -> None:
    _check_splits(config, task)
    if not len(task.prompts("train")):
        msg = f"task {config.task.name!r} has no training prompts; change task.args"
        raise TaskError(msg)
    summary = check_task(task)  # unique ids; no held-out problem is trained on
    if config.task.fingerprint and config.task.fingerprint != summary.fingerprint:
        msg = (
            f"task.fingerprint = {config.task.fingerprint!r}, but the training prompts of task"
            f" {config.task.name!r} have {summary.fingerprint!r} here: they are not those that this"
            " configuration was written for. Bring those back, or take task.fingerprint out of the"
            " configuration to train on these"
        )
        raise ConfigError(msg)
    held_out = summary.num_eval
    if held_out < config.eval.num_prompts:
        msg = (
            f"eval.num_prompts = {config.eval.num_prompts}, but task {config.task.name!r} holds"
            f" {held_out} prompts out; lower it, or hold out more in task.args"
        )
        raise ConfigError(msg)


def _check_references(config: Config, task: Task) -> None:
    known = frozenset(config.model.tokenizer_chars or "")
    for prompt in warm_start_prompts(config, task):
        if prompt.reference is None:
            msg = (
                f"warm_start.steps = {config.warm_start.steps} needs prompts with a reference, and"
                f" prompt {prompt.prompt_id!r} of task {config.task.name!r} has none; set it to 0"
            )
            raise ConfigError(msg)
        unknown = sorted(set(prompt.reference) - known) if known else []
        if unknown:
            msg = (
                f"the reference of prompt {prompt.prompt_id!r} has characters outside"
                f" model.tokenizer_chars: {''.join(unknown)!r}; add them"
            )
            raise ConfigError(msg)


def _check_prompts(config: Config, task: Task, context: int | None) -> None:
    encode_length = _length_function(config.model)
    rollout = config.rollout
    kept = kept_tokens(rollout.max_tokens) if rollout.backend == "sglang" else 0
    splits: tuple[Split, ...] = ("train", "eval")
    for split in splits:
        for prompt in itertools.islice(task.prompts(split), _MAX_CHECKED):
            length = encode_length(prompt)
            if context is not None and length + rollout.max_tokens + kept > context:
                more = f" and {kept} tokens that SGLang keeps to itself" if kept else ""
                msg = (
                    f"prompt {prompt.prompt_id!r} has {length} tokens; with rollout.max_tokens ="
                    f" {rollout.max_tokens}{more} it is longer than the model's context of"
                    f" {context} tokens: shorten one, or give the model a longer context"
                )
                raise ConfigError(msg)


def _context_tokens(model: ModelConfig) -> int | None:
    if model.build is not None:
        value = model.build.get("max_position_embeddings")
    else:
        directory = Path(model.path or "")
        file = directory / "config.json"
        if not file.is_file():
            msg = (
                f"model.path = {model.path!r} holds no config.json; give a local Hugging Face"
                " model directory"
            )
            raise ConfigError(msg)
        try:
            value = json.loads(file.read_text(encoding="utf-8")).get("max_position_embeddings")
        except (ValueError, AttributeError) as error:
            msg = f"model.path: {file} is not a Hugging Face configuration: {error}"
            raise ConfigError(msg) from None
    return value if isinstance(value, int) else None


def _length_function(model: ModelConfig) -> Callable[[Prompt], int]:
    if model.tokenizer_chars is not None:
        if model.chat_template:
            raise ConfigError(_NO_TEMPLATE)
        known = frozenset(model.tokenizer_chars)

        def count_chars(prompt: Prompt) -> int:
            unknown = sorted(set(prompt.text) - known)
            if unknown:
                msg = (
                    f"prompt {prompt.prompt_id!r} has characters outside model.tokenizer_chars:"
                    f" {''.join(unknown)!r}; add them"
                )
                raise ConfigError(msg)
            return len(prompt.text)

        return count_chars
    from ratchet.backends.models import encode_prompt, load_tokenizer

    tokenizer = load_tokenizer(Path(model.path or ""))
    if model.chat_template and not tokenizer.chat_template:
        raise ConfigError(_NO_TEMPLATE)
    return lambda prompt: len(
        encode_prompt(tokenizer, prompt.text, chat_template=model.chat_template)
    )
