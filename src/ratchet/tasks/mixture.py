"""The task "mixture": several tasks in one run, weighted.

Consumes built tasks with their labels and weights, produces their prompts under ids that begin with
the label, and sends each question about a prompt to the task that it came from; waits for nothing.
Who takes turns with whom in training is `actors.prompt_source`'s; here the prompts of a split are
in the same proportions, so that the first ones of them (a warm start, an evaluation) are a mixture
as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

import msgspec

from ratchet.errors import TaskError
from ratchet.tasks.base import Conversation, MultiTurnTask, Split, Step, Task
from ratchet.tasks.proportions import interleave
from ratchet.types import Prompt

_SEPARATOR: Final = "/"


def label_of(prompt_id: str) -> str:
    """Return which task of a mixture a prompt is of; "" where it says none.

    >>> label_of("copy/8f3a")
    'copy'
    """
    label, separator, _ = prompt_id.partition(_SEPARATOR)
    return label if separator else ""


class MixtureTask:
    """Several tasks as one. Where none of them has turns, `max_turns` is 1 throughout."""

    def __init__(self, tasks: Mapping[str, Task], weights: Mapping[str, float]) -> None:
        """Put tasks together.

        Args:
            tasks: by label.
            weights: by label; finite and greater than 0.
        """
        self._tasks = dict(tasks)
        self._weights = [weights[label] for label in tasks]
        self._split = cache(self._mix)

    def prompts(self, split: Split) -> tuple[Prompt, ...]:
        """Return the prompts of all tasks, those of each in its own order.

        Raises:
            TaskError: if a task has nothing to train on.
        """
        return self._split(split)

    def score(self, prompt: Prompt, completion: str) -> float:
        """Return what the prompt's task says."""
        task, own = self._of(prompt)
        return task.score(own, completion)

    def max_turns(self, prompt: Prompt) -> int:
        """Return what the prompt's task says; 1 if it has no turns."""
        task, own = self._of(prompt)
        return task.max_turns(own) if isinstance(task, MultiTurnTask) else 1

    def step(self, prompt: Prompt, conversation: Conversation) -> Step:
        """Return what the environment of the prompt's task answers."""
        task, own = self._with_turns(prompt)
        return task.step(own, conversation)

    def score_conversation(self, prompt: Prompt, conversation: Conversation) -> float:
        """Return what the prompt's task says."""
        task, own = self._with_turns(prompt)
        return task.score_conversation(own, conversation)

    def _mix(self, split: Split) -> tuple[Prompt, ...]:
        parts: list[Sequence[Prompt]] = []
        for label, task in self._tasks.items():
            prompts = task.prompts(split)
            if split == "train" and not prompts:
                msg = f"task.tasks: the task {label!r} has no prompts to train on"
                raise TaskError(msg)
            parts.append([_renamed(each, label + _SEPARATOR + each.prompt_id) for each in prompts])
        return interleave(parts, self._weights)

    def _of(self, prompt: Prompt) -> tuple[Task, Prompt]:
        """Return the task, and the prompt as that task knows it."""
        label, _, own_id = prompt.prompt_id.partition(_SEPARATOR)
        task = self._tasks.get(label)
        if task is None:
            msg = (
                f"the prompt {prompt.prompt_id!r} is of none of the tasks of this run:"
                f" {', '.join(self._tasks)}"
            )
            raise TaskError(msg)
        return task, _renamed(prompt, own_id)

    def _with_turns(self, prompt: Prompt) -> tuple[MultiTurnTask, Prompt]:
        task, own = self._of(prompt)
        if not isinstance(task, MultiTurnTask):
            msg = f"the task of the prompt {prompt.prompt_id!r} has no turns; ask its `score`"
            raise TypeError(msg)
        return task, own


def _renamed(prompt: Prompt, prompt_id: str) -> Prompt:
    return msgspec.structs.replace(prompt, prompt_id=prompt_id)
