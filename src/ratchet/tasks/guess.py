"""The task "guess": find a number between two others, told after each guess which way to go.

Consumes its arguments and a seed, produces prompts such as "12-57?" and answers each guess with ">"
(the number is greater), "<" (it is less) or "?" (that was no number between the two); waits for
nothing. The smallest task of several turns there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from ratchet.errors import TaskError
from ratchet.tasks.arguments import Holdout, TaskArgs, parse_args
from ratchet.tasks.base import Conversation, Split, Step
from ratchet.tasks.problems import problem_id, split_by_text
from ratchet.types import Prompt

_DEFAULT_PROMPTS = 8192


class GuessArgs(TaskArgs):
    """`task.args` of the task "guess"."""

    highest: Annotated[int, Field(gt=0, le=10**9)] = 99
    """The largest number; 0 is the smallest."""
    turns: Annotated[int, Field(gt=1)] = 4
    """Guesses that the policy has."""
    num_prompts: Annotated[int, Field(gt=0)] | None = None
    """Distinct pairs of bounds, held-out ones included; by default 8192, or all that there are."""
    holdout: Holdout = 256


class GuessTask:
    """Distinct random bounds, and a number between them that is to be found."""

    def __init__(self, args: GuessArgs, seed: int) -> None:
        possible = args.highest * (args.highest + 1) // 2
        num_prompts = args.num_prompts or min(_DEFAULT_PROMPTS, possible)
        if num_prompts > possible:
            msg = (
                f"task.args.num_prompts = {num_prompts} is more than the {possible} pairs of bounds"
                f" up to task.args.highest = {args.highest}; ask for fewer, or for a higher one"
            )
            raise TaskError(msg)
        self._turns = args.turns
        rng = np.random.default_rng(seed)
        bounds: dict[tuple[int, int], None] = {}  # ordered, as a set is not
        while len(bounds) < num_prompts:
            pairs = np.sort(rng.integers(0, args.highest + 1, (num_prompts, 2)))
            bounds |= dict.fromkeys((low, high) for low, high in pairs.tolist() if low < high)
        prompts = [
            _prompt(low, high, int(rng.integers(low, high + 1)))
            for low, high in list(bounds)[:num_prompts]
        ]
        self._splits = split_by_text(prompts, args.holdout)

    def prompts(self, split: Split) -> tuple[Prompt, ...]:
        """Return the prompts of a split, in an order that depends on the seed."""
        return self._splits.of(split)

    def score(self, prompt: Prompt, completion: str) -> float:
        """Return 1.0 for the number itself, at once."""
        return float(completion == prompt.reference)

    def max_turns(self, prompt: Prompt) -> int:
        """Return how many guesses there are."""
        del prompt
        return self._turns

    def step(self, prompt: Prompt, conversation: Conversation) -> Step:
        """Say which way to go; nothing once the number is found."""
        guess = conversation.turns[-1]
        if guess == prompt.reference:
            return Step()
        low, high = (int(bound) for bound in prompt.text.removesuffix("?").split("-"))
        if not (guess.isascii() and guess.isdigit() and low <= int(guess) <= high):
            return Step("?")
        return Step(">" if int(guess) < int(prompt.reference or "") else "<")

    def score_conversation(self, prompt: Prompt, conversation: Conversation) -> float:
        """Return 1.0 for the number at the first guess, less for each further one, 0.0 without."""
        if conversation.turns[-1] != prompt.reference:
            return 0.0
        return 1.0 - (len(conversation.turns) - 1) / self._turns


def build_guess(args: Mapping[str, Any], seed: int) -> GuessTask:
    """Build the task from `task.args`.

    Raises:
        TaskError: if an argument is wrong.
    """
    return GuessTask(parse_args(GuessArgs, args), seed)


def _prompt(low: int, high: int, number: int) -> Prompt:
    text = f"{low}-{high}?"
    return Prompt(prompt_id=problem_id(text), text=text, reference=str(number))
