"""Problems with known answers, read from files: what the tasks "jsonl" and "dataset" share.

Consumes rows, each with its place ("file:line"), produces prompts in two splits and their scores;
waits for the disk. Rows are read when prompts are first asked for: a process that only scores
never does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TypeAlias

from ratchet.errors import TaskError
from ratchet.tasks.answers import Score, ScoreName
from ratchet.tasks.arguments import Holdout, TaskArgs
from ratchet.tasks.base import Split
from ratchet.tasks.problems import Splits, split_by_text
from ratchet.types import Prompt

Rows: TypeAlias = Iterable[tuple[str, Prompt]]
"""The place of each prompt, for people, and the prompt."""


class AnsweredArgs(TaskArgs):
    """What both tasks have in `task.args`."""

    path: str
    """Where the data is; a relative path starts at the working directory."""
    eval_path: str | None = None
    """Other data that is all held out, in place of `holdout`."""
    holdout: Holdout = 0
    score: ScoreName = "exact"


class AnsweredTask:
    """Problems with known answers, or with a reward function of the user's own."""

    def __init__(self, read: Callable[[], Splits], score: Score) -> None:
        self._read = read
        self._score = score

    def prompts(self, split: Split) -> tuple[Prompt, ...]:
        """Return the prompts of a split, in the order of the data.

        Raises:
            TaskError: with the place, if the data is wrong.
        """
        return self._splits.of(split)

    def score(self, prompt: Prompt, completion: str) -> float:
        """Return 1.0 if the completion gives the answer, else 0.0.

        Raises:
            RewardFailed: if the prompt has no answer.
        """
        return self._score(prompt, completion)

    @cached_property
    def _splits(self) -> Splits:
        return self._read()


def split_rows(train: Rows, held_out: Rows | None, holdout: float, *, held_out_by: str) -> Splits:
    """Put rows into the two splits.

    Args:
        train: rows to train on.
        held_out: rows to hold out, if they are given apart.
        holdout: what to hold out of `train`; 0 where `held_out` is given.
        held_out_by: the argument that gives `held_out`, for the errors.

    Raises:
        TaskError: if an id is there twice, a problem would be in both splits, or nothing is there.
    """
    place_of: dict[str, str] = {}
    if held_out is None:
        return split_by_text(_unique(train, place_of, "path"), holdout)
    if holdout:
        msg = (
            f"task.args.holdout = {holdout:g} and task.args.{held_out_by} both say what is held"
            " out; give one of them"
        )
        raise TaskError(msg)
    splits = Splits(_unique(train, place_of, "path"), _unique(held_out, place_of, held_out_by))
    trained = {prompt.text: prompt.prompt_id for prompt in splits.train}
    for prompt in splits.eval:
        if prompt.text in trained:
            first, second = place_of[trained[prompt.text]], place_of[prompt.prompt_id]
            msg = (
                f"the problem {prompt.text!r} is at {first} and at {second}; held-out problems"
                " must not be trained on, so take it out of one of them"
            )
            raise TaskError(msg)
    return splits


def _unique(rows: Rows, place_of: dict[str, str], field: str) -> tuple[Prompt, ...]:
    """Return the prompts; ids are unique across all rows whose places are noted."""
    prompts = []
    for place, prompt in rows:
        first = place_of.setdefault(prompt.prompt_id, place)
        if first != place:
            msg = (
                f"{place}: the id {prompt.prompt_id!r} is already taken by {first} (without an"
                " id, the same prompt has the same one); remove it, or give it an id of its own"
            )
            raise TaskError(msg)
        prompts.append(prompt)
    if not prompts:
        msg = f"task.args.{field}: there are no lines or rows in it"
        raise TaskError(msg)
    return tuple(prompts)
