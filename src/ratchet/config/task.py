"""The section [task]: where prompts and rewards come from. Pure; waits for nothing."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import model_validator

from ratchet.config.section import Positive, PositiveFloat, Section


class OneTaskConfig(Section):
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


class TaskConfig(Section):
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
