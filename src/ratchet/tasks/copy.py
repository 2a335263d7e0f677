"""The task "copy": repeat a string of digits.

Consumes its arguments and a seed, produces prompts such as "4071>" whose right completion is
"4071"; waits for nothing. The reward is dense, so that a model with random weights learns it in
seconds: the smallest whole run there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from ratchet.errors import TaskError
from ratchet.tasks.arguments import Holdout, TaskArgs, parse_args
from ratchet.tasks.base import Split
from ratchet.tasks.problems import problem_id, split_by_text
from ratchet.types import Prompt

_DEFAULT_PROMPTS = 8192


class CopyArgs(TaskArgs):
    """`task.args` of the task "copy"."""

    digits: Annotated[int, Field(gt=0, le=18)] = 4
    """Length of a string; 18 digits still fit into 64 bits."""
    num_prompts: Annotated[int, Field(gt=0)] | None = None
    """Distinct strings, held-out ones included; by default 8192, or all that there are."""
    holdout: Holdout = 256


class CopyTask:
    """Distinct random digit strings, to be copied."""

    def __init__(self, args: CopyArgs, seed: int) -> None:
        possible = 10**args.digits
        num_prompts = args.num_prompts or min(_DEFAULT_PROMPTS, possible)
        if num_prompts > possible:
            msg = (
                f"task.args.num_prompts = {num_prompts} is more than the {possible} strings of"
                f" task.args.digits = {args.digits}; ask for fewer, or for more digits"
            )
            raise TaskError(msg)
        numbers = np.random.default_rng(seed).choice(possible, num_prompts, replace=False)
        strings = [f"{number:0{args.digits}d}" for number in numbers.tolist()]
        self._splits = split_by_text([_prompt(string) for string in strings], args.holdout)

    def prompts(self, split: Split) -> tuple[Prompt, ...]:
        """Return the prompts of a split, in an order that depends on the seed."""
        return self._splits.of(split)

    def score(self, prompt: Prompt, completion: str) -> float:
        """Return the share of right positions, the position of the end included: 1.0 is an exact
        copy.
        """
        return share_of_right_positions(prompt.text.removesuffix(">"), completion)


def build_copy(args: Mapping[str, Any], seed: int) -> CopyTask:
    """Build the task from `task.args`.

    Raises:
        TaskError: if an argument is wrong.
    """
    return CopyTask(parse_args(CopyArgs, args), seed)


def share_of_right_positions(target: str, completion: str) -> float:
    """Compare position by position; the end of the text counts as one more position.

    >>> share_of_right_positions("407", "417")
    0.75
    >>> share_of_right_positions("407", "4071")
    0.75
    """
    right = sum(a == b for a, b in zip(target, completion, strict=False))
    right += len(completion) == len(target)
    return right / (len(target) + 1)


def _prompt(string: str) -> Prompt:
    text = f"{string}>"
    return Prompt(prompt_id=problem_id(text), text=text, reference=string)
