"""From `[task]` of the configuration to a task.

Consumes a `TaskConfig`, produces a `Task` or a `TaskError` that names the field, its value and the
way out. Waits for nothing. Built-in tasks are known by name and imported when they are asked for;
any other is "module:object": a task, or a class or function that makes one from `task.args` (and
from `seed`, where it has a parameter of that name). Where there are `task.tasks`, each is built so,
and `task.reward` scores those that have no reward of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, cast

from ratchet.config import TaskConfig
from ratchet.errors import ConfigError, TaskError, UserError
from ratchet.imports import import_object
from ratchet.tasks.arguments import suggest
from ratchet.tasks.base import MultiTurnTask, Split, Task
from ratchet.types import Prompt

Reward: TypeAlias = Callable[[Prompt, str], float]
"""What `task.reward` names: the prompt and the completion's text to a finite number."""


def build_task(config: TaskConfig, seed: int) -> Task:
    """Build the task of a run; alike in every process that does it.

    Args:
        config: the section `[task]`.
        seed: the run's.

    Raises:
        TaskError: if the task or the reward does not import, or its arguments or data are wrong.
    """
    if config.tasks:
        return _mixture(config, seed)
    if config.name in _BUILTIN:
        task = _BUILTIN[config.name](config, seed)
    elif ":" in config.name:
        task = _build_own(config, seed)
    else:
        msg = (
            f"task.name = {config.name!r} is not a built-in task; "
            f'{suggest(config.name, list(_BUILTIN))} (a task of your own is "module:object")'
        )
        raise TaskError(msg)
    if config.reward is None:
        return task
    if isinstance(task, MultiTurnTask):
        msg = (
            f"task.reward = {config.reward!r} scores a completion, and {config.name!r} is a task of"
            " several turns, which scores conversations; leave it out, or wrap the task and its"
            " `score_conversation` in a task of your own"
        )
        raise TaskError(msg)
    return RewardedTask(task, load_reward(config.reward))


class RewardedTask:
    """A task whose score is a function of the user's own."""

    def __init__(self, task: Task, reward: Reward) -> None:
        self._task = task
        self._reward = reward

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Return the prompts of the task underneath."""
        return self._task.prompts(split)

    def score(self, prompt: Prompt, completion: str) -> float:
        """Return what the reward function returns; whoever calls judges whether it is finite."""
        return self._reward(prompt, completion)


def load_reward(reference: str) -> Reward:
    """Import the function that `task.reward` names.

    Raises:
        TaskError: if it does not import, or cannot be called with (prompt, completion).
    """
    reward = _import("task.reward", reference)
    if not callable(reward):
        msg = f"task.reward = {reference!r} is {reward!r}, not a function (prompt, completion)"
        raise TaskError(msg)
    signature = inspect.signature(reward)
    try:
        signature.bind(None, "")
    except TypeError as error:
        msg = (
            f"task.reward = {reference!r} takes {signature}: {error}; it is called with two"
            " arguments, (prompt: Prompt, completion: str), and returns a number"
        )
        raise TaskError(msg) from None
    return cast("Reward", reward)


def _build_own(config: TaskConfig, seed: int) -> Task:
    found = _import("task.name", config.name)
    if isinstance(found, Task) and not isinstance(found, type):
        if config.args:
            msg = (
                f"task.args = {config.args}: {config.name!r} is a task already and takes no"
                " arguments; name the class or function that makes it"
            )
            raise TaskError(msg)
        return found
    if not callable(found):
        msg = (
            f"task.name = {config.name!r} is {found!r}: neither a task nor a class or function that"
            " makes one"
        )
        raise TaskError(msg)
    made = _call(found, config, seed)
    if not isinstance(made, Task):
        msg = (
            f"task.name = {config.name!r} made {made!r}, which is not a task: it needs the methods"
            " prompts(split) and score(prompt, completion)"
        )
        raise TaskError(msg)
    return made


def _call(factory: Callable[..., object], config: TaskConfig, seed: int) -> object:
    signature = inspect.signature(factory)
    kwargs: dict[str, Any] = dict(config.args)
    if "seed" in signature.parameters:
        kwargs.setdefault("seed", seed)
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        msg = f"task.args = {config.args}: {config.name!r} takes {signature}: {error}"
        raise TaskError(msg) from None
    try:
        return factory(**kwargs)
    except UserError:
        raise
    except Exception as error:
        msg = f"task.name = {config.name!r} failed to build: {type(error).__name__}: {error}"
        raise TaskError(msg) from error


def _import(field: str, reference: str) -> object:
    try:
        return import_object(reference)
    except ConfigError as error:
        msg = f"{field}: {error}"
        raise TaskError(msg) from error


def _copy(config: TaskConfig, seed: int) -> Task:
    from ratchet.tasks.copy import build_copy

    return build_copy(config.args, seed)


def _guess(config: TaskConfig, seed: int) -> Task:
    from ratchet.tasks.guess import build_guess

    return build_guess(config.args, seed)


def _mixture(config: TaskConfig, seed: int) -> Task:
    from ratchet.tasks.mixture import MixtureTask

    tasks: dict[str, Task] = {}
    for part in config.tasks:
        reward = part.reward if part.reward is not None else config.reward
        own = TaskConfig(name=part.name, args=part.args, reward=reward)
        try:
            tasks[part.key] = build_task(own, seed)
        except TaskError as error:
            msg = f"the task {part.key!r} of task.tasks: {error}"
            raise TaskError(msg) from error
    return MixtureTask(tasks, config.weights)


def _dataset(config: TaskConfig, seed: int) -> Task:
    from ratchet.tasks.dataset import build_dataset

    del seed  # the data's order is kept
    return build_dataset(config.args, needs_answers=config.reward is None)


def _jsonl(config: TaskConfig, seed: int) -> Task:
    from ratchet.tasks.jsonl import build_jsonl

    del seed  # the file's order is kept
    return build_jsonl(config.args, needs_answers=config.reward is None)


def _reasoning_gym(config: TaskConfig, seed: int) -> Task:
    from ratchet.tasks.reasoning_gym import build_reasoning_gym

    return build_reasoning_gym(config.args, seed)


def _verifiers(config: TaskConfig, seed: int) -> Task:
    from ratchet.tasks.verifiers import build_verifiers

    return build_verifiers(config.args, seed, needs_rubric=config.reward is None)


_BUILTIN: Final[dict[str, Callable[[TaskConfig, int], Task]]] = {
    "copy": _copy,
    "dataset": _dataset,
    "guess": _guess,
    "jsonl": _jsonl,
    "reasoning-gym": _reasoning_gym,
    "verifiers": _verifiers,
}
