"""The protocol of a task: where prompts and rewards come from.

A task consumes its own arguments, produces prompts and scores, waits for nothing. It is built alike
in every process that needs it (the buffer issues prompts, rollouts score), so it must be
deterministic: same arguments, same prompts, same ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from ratchet.types import Prompt

Split: TypeAlias = Literal["train", "eval"]


@runtime_checkable
class Task(Protocol):
    """Prompts with stable ids in two disjoint splits, and a score for a completion."""

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Return the prompts of a split. No prompt is in both; ids are unique within the task."""
        ...

    def score(self, prompt: Prompt, completion: str) -> float:
        """Return the reward of a completion (end-of-sequence removed). May raise: a failed group,
        never a zero.
        """
        ...
