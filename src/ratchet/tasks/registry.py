"""From `[task]` of the configuration to a task.

Consumes a `TaskConfig`, produces a `Task` or a `TaskError` that names the field, its value and the
way out. Waits for nothing. Built-in tasks are known by name and imported when they are asked for;
any other is "module:object": a task, or a class or function that makes one from `task.args` (and
from `seed`, where it has a parameter of that name). Where there are `task.tasks`, each is built so,
and `task.reward` scores those that have no reward of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, cast

from ratchet.config import TaskConfig
from ratchet.errors import ConfigError, TaskError, UserError
from ratchet.imports import import_object
from ratchet.tasks.arguments import suggest
from ratchet.tasks.base import MultiTurnTask, Split, Task
from ratchet.types import Prompt

Reward: TypeAlias = Callable[[Prompt, str], float]
"""What `task.reward` names: the prompt and the completion's text to a finite number."""


def build_task(config: TaskConfig, seed: int, reward: Reward | None = None) -> Task:
    """Build the task of a run; alike in every process that does it.

    Args:
        config: the section `[task]`.
        seed: the run's.
        reward: in the place of what `task.reward` names, where all is in one process.

    Raises:
        TaskError: if the task or the reward does not import, or its arguments or data are wrong.
    """
    if config.tasks:
        return _mixture(config, seed, reward)
    is_scored = reward is not None or config.reward is not None
    if config.name in _BUILTIN:
        task = _BUILTIN[config.name](_Table(config.args, seed, is_scored))
    elif ":" in config.name:
        task = _build_own(config, seed)
    else:
        msg = (
            f"task.name = {config.name!r} is not a built-in task; "
            f'{suggest(config.name, list(_BUILTIN))} (a task of your own is "module:object")'
        )
        raise TaskError(msg)
    if not is_scored:
        return task
    if isinstance(task, MultiTurnTask):
        named = f"task.reward = {config.reward!r}" if reward is None else f"reward = {reward!r}"
        msg = (
            f"{named} scores a completion, and {config.name!r} is a task of several turns, which"
            " scores conversations; leave it out, or wrap the task and its `score_conversation` in"
            " a task of your own"
        )
        raise TaskError(msg)
    return RewardedTask(task, reward or load_reward(str(config.reward)))


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


class _Table(NamedTuple):
    """What a built-in task is made from."""

    args: Mapping[str, Any]
    seed: int
    """the run's; not used where the data's own order is kept"""
    is_scored: bool
    """a reward of the user's own scores, so the data needs no answers"""


def _copy(table: _Table) -> Task:
    from ratchet.tasks.copy import build_copy

    return build_copy(table.args, table.seed)


def _guess(table: _Table) -> Task:
    from ratchet.tasks.guess import build_guess

    return build_guess(table.args, table.seed)


def _mixture(config: TaskConfig, seed: int, reward: Reward | None) -> Task:
    from ratchet.tasks.mixture import MixtureTask

    tasks: dict[str, Task] = {}
    for part in config.tasks:
        named = part.reward if part.reward is not None else config.reward
        own = TaskConfig(name=part.name, args=part.args, reward=named)
        try:
            tasks[part.key] = build_task(own, seed, None if part.reward is not None else reward)
        except TaskError as error:
            msg = f"the task {part.key!r} of task.tasks: {error}"
            raise TaskError(msg) from error
    return MixtureTask(tasks, config.weights)


def _dataset(table: _Table) -> Task:
    from ratchet.tasks.dataset import build_dataset

    return build_dataset(table.args, needs_answers=not table.is_scored)


def _jsonl(table: _Table) -> Task:
    from ratchet.tasks.jsonl import build_jsonl

    return build_jsonl(table.args, needs_answers=not table.is_scored)


def _reasoning_gym(table: _Table) -> Task:
    from ratchet.tasks.reasoning_gym import build_reasoning_gym

    return build_reasoning_gym(table.args, table.seed)


def _verifiers(table: _Table) -> Task:
    from ratchet.tasks.verifiers import build_verifiers

    return build_verifiers(table.args, table.seed, needs_rubric=not table.is_scored)


_BUILTIN: Final[dict[str, Callable[[_Table], Task]]] = {
    "copy": _copy,
    "dataset": _dataset,
    "guess": _guess,
    "jsonl": _jsonl,
    "reasoning-gym": _reasoning_gym,
    "verifiers": _verifiers,
}
