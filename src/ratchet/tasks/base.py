"""The protocol of a task: where prompts and rewards come from.

A task consumes its own arguments, produces prompts and scores, waits for nothing. It is built alike
in every process that needs it (the buffer issues prompts, rollouts score), so it must be
deterministic: same arguments, same prompts, same ids.

A task of several turns is an environment without memory: what it has to remember between two turns
travels in the conversation, so that any reward process can take the next turn of any trajectory,
and a group that is tried again begins with nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

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


class Conversation(msgspec.Struct, frozen=True):
    """One trajectory of several turns so far, behind its prompt."""

    turns: tuple[str, ...]
    """what the policy said, end-of-sequence removed; at least one"""
    replies: tuple[str, ...] = ()
    """what the environment answered to each turn but the last"""
    state: Any = None
    """what the last `step` has left for the next; msgpack-able; None before the first"""
    seed: int = 0
    """of this trajectory: draw from it and the number of turns, from nothing else"""


class Step(msgspec.Struct, frozen=True):
    """What the environment does after a turn of the policy."""

    reply: str | None = None
    """its next message; None: the conversation is over"""
    state: Any = None
    """for the next `step` and for the score; msgpack-able"""


@runtime_checkable
class MultiTurnTask(Task, Protocol):
    """A task whose environment answers, and which scores the whole conversation at its end.

    A conversation ends when the environment has nothing more to say, after `max_turns` turns, when
    the context of the model is full, or with a turn that is cut off at `rollout.max_tokens`.
    """

    def max_turns(self, prompt: Prompt) -> int:
        """Return how many turns the policy has at most; 1 where `score` alone is asked."""
        ...

    def step(self, prompt: Prompt, conversation: Conversation) -> Step:
        """Answer the last turn, which was not cut off. May raise: a failed group.

        It is also asked after the last turn that the policy has; its reply is then not used, its
        state is.
        """
        ...

    def score_conversation(self, prompt: Prompt, conversation: Conversation) -> float:
        """Return the reward of an ended conversation. May raise: a failed group, never a zero."""
        ...
