"""Which prompt comes next: each epoch is one seeded permutation of the task's training prompts.

Pure: consumes a seed and the prompts, produces (epoch, prompt) pairs without end; waits for
nothing. The order depends on (seed, epoch) alone, so that it can be found again from the cursor.
"""

from __future__ import annotations

import random  # noqa: TID251 - one seeded generator per epoch, no state shared
from collections.abc import Sequence

from ratchet.errors import TaskError
from ratchet.types import Prompt


class PromptSource:
    """Each prompt once an epoch, epoch after epoch."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not prompts:
            msg = "the task has no training prompts: give it at least one (task.args)"
            raise TaskError(msg)
        self._prompts = prompts
        self._seed = seed
        self._order: list[int] = []
        self.epoch = -1
        self.position = 0
        self._next_epoch()

    def next(self) -> tuple[int, Prompt]:
        """Return the epoch and the prompt, and move the cursor behind it."""
        if self.position == len(self._order):
            self._next_epoch()
        prompt = self._prompts[self._order[self.position]]
        self.position += 1
        return self.epoch, prompt

    def _next_epoch(self) -> None:
        self.epoch += 1
        self.position = 0
        self._order = list(range(len(self._prompts)))
        # seeded by (seed, epoch), not drawn: the order is part of the run's identity
        random.Random(f"{self._seed}/{self.epoch}").shuffle(self._order)  # noqa: S311
