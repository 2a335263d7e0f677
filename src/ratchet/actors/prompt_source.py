"""Which prompt comes next: each epoch of a task is one seeded permutation of its training prompts,
and several tasks take turns by their weights.

Pure: consumes a seed, the prompts and the weights, produces (epoch, prompt) pairs without end;
waits for nothing. An epoch is a task's own: the n-th pass over its prompts. What comes next depends
on the seed and on how many prompts were issued, and on nothing else, so that it can be found again
from the cursor. Its two numbers say how many those are: `epoch` times all prompts, and `position`.
With one task its epoch is the task's.
"""

from __future__ import annotations

import random  # noqa: TID251 - one seeded generator per epoch, no state shared
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from ratchet.errors import TaskError
from ratchet.tasks.mixture import label_of
from ratchet.tasks.proportions import Turns
from ratchet.types import Prompt


class PromptSource:
    """Each prompt once in each epoch of its task, epoch after epoch."""

    def __init__(
        self, prompts: Sequence[Prompt], seed: int, weights: Mapping[str, float] | None = None
    ) -> None:
        """Begin with the first prompt.

        Args:
            prompts: of all tasks.
            seed: the run's.
            weights: of a mixture, by the labels that its prompts' ids begin with; None for one
                task.

        Raises:
            TaskError: if a task has no prompts.
        """
        self._num_prompts = len(prompts)
        if not weights:
            self._tasks = [_Epochs(prompts, str(seed))]
            self._weights: tuple[float, ...] = (1.0,)
        else:
            of_label: dict[str, list[Prompt]] = {label: [] for label in weights}
            for prompt in prompts:
                of_label[label_of(prompt.prompt_id)].append(prompt)
            self._tasks = [_Epochs(each, f"{seed}/{label}") for label, each in of_label.items()]
            self._weights = tuple(weights.values())
        self.seek(0, 0)

    def seek(self, epoch: int, position: int) -> None:
        """Put the cursor to where it was when it had these two numbers."""
        self.epoch, self.position = epoch, position
        self._turns = Turns(self._weights, epoch * self._num_prompts + position)

    def find(self, prompt_ids: Collection[str]) -> dict[str, Prompt]:
        """Return these prompts by id.

        Raises:
            TaskError: naming one that the task does not have.
        """
        found = self._by_id
        missing = sorted(set(prompt_ids) - found.keys())
        if missing:
            msg = (
                f"the ledger has groups of {len(missing)} prompts that the task does not have, such"
                f" as {missing[0]!r}: the data has changed; go on with the same"
            )
            raise TaskError(msg)
        return {prompt_id: found[prompt_id] for prompt_id in prompt_ids}

    @cached_property
    def _by_id(self) -> dict[str, Prompt]:
        return {p.prompt_id: p for task in self._tasks for p in task.prompts}

    def next(self) -> tuple[int, Prompt]:
        """Return the epoch and the prompt, and move the cursor behind it."""
        if self.position == self._num_prompts:
            self.epoch, self.position = self.epoch + 1, 0
        self.position += 1
        task = self._turns.next()
        return self._tasks[task].at(self._turns.counts[task] - 1)


class _Epochs:
    """The prompts of one task in the order of their issue."""

    def __init__(self, prompts: Sequence[Prompt], seed: str) -> None:
        if not prompts:
            msg = "the task has no training prompts: give it at least one (task.args)"
            raise TaskError(msg)
        self.prompts = prompts
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def at(self, index: int) -> tuple[int, Prompt]:
        """Return the epoch and the prompt of an issue, counted from the first one on."""
        epoch, position = divmod(index, len(self.prompts))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = list(range(len(self.prompts)))
            # seeded by (seed, epoch), not drawn: the order is part of the run's identity
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)  # noqa: S311
        return epoch, self.prompts[self._order[position]]
