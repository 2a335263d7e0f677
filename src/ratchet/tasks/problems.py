"""Telling problems apart: stable ids, splits that share no problem, and the check of a whole task.

Consumes prompts, produces ids, splits, counts and a fingerprint; waits for nothing. Two prompts
with the same text are the same problem, whatever else they carry. Whether a problem is held out
depends on its text alone and never on the seed or the order of the data, so that no run trains on
what another run evaluates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import xxhash

from ratchet.errors import TaskError
from ratchet.tasks.base import Split, Task
from ratchet.types import Prompt

_HASHES = 2**64


def problem_hash(text: str) -> int:
    """Return a 64-bit hash of a problem that is the same in every process and release."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


def problem_id(text: str) -> str:
    """Return the prompt id that follows from a problem's text: 16 hexadecimal digits."""
    return f"{problem_hash(text):016x}"


class Splits(NamedTuple):
    """The prompts of a task, each in one of the two splits, in the order they were given."""

    train: tuple[Prompt, ...]
    eval: tuple[Prompt, ...]

    def of(self, split: Split) -> tuple[Prompt, ...]:
        """Return the prompts of a split."""
        return self.train if split == "train" else self.eval


def split_by_text(prompts: Sequence[Prompt], holdout: float) -> Splits:
    """Hold out the problems with the lowest hashes.

    Args:
        prompts: in the order in which they are to be issued.
        holdout: a number of problems, or a share between 0 and 1. A share decides each problem by
            itself, so that more data moves no problem from one split to the other.

    Raises:
        TaskError: if nothing would be left to train on.
    """
    hashes = [problem_hash(prompt.text) for prompt in prompts]
    if 0 < holdout < 1:
        held_out = {value for value in hashes if value < holdout * _HASHES}
    else:
        held_out = set(sorted(set(hashes))[: int(holdout)])
    pairs = list(zip(prompts, hashes, strict=True))
    splits = Splits(
        train=tuple(prompt for prompt, value in pairs if value not in held_out),
        eval=tuple(prompt for prompt, value in pairs if value in held_out),
    )
    if not splits.train:
        msg = (
            f"task.args.holdout = {holdout:g} leaves nothing to train on: the task has"
            f" {len(set(hashes))} distinct problems; hold out fewer"
        )
        raise TaskError(msg)
    return splits


class TaskSummary(NamedTuple):
    """How much a task offers."""

    num_train: int
    """prompts of the train split"""
    num_eval: int
    """prompts of the eval split"""
    num_problems: int
    """distinct problems of both"""
    fingerprint: str
    """of the prompts of the train split, see `fingerprint`"""


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return a digest of prompts: their ids, texts and references, in this order. 32 hexadecimal
    digits that are the same in every process and release.

    Nobody who means harm is kept out by it: it is there for data that was changed by accident.
    """
    digest = xxhash.xxh3_128()
    for prompt in prompts:
        fields = (prompt.prompt_id, prompt.text, prompt.reference)
        digest.update(msgspec.msgpack.encode(fields))  # which says where each of them ends
    return digest.hexdigest()


def check_task(task: Task) -> TaskSummary:
    """Prove what a task promises about its prompts, and count them.

    Raises:
        TaskError: if there is nothing to train on, a prompt is not a `Prompt`, an id occurs twice,
            or a problem is in both splits.
    """
    train, held_out = task.prompts("train"), task.prompts("eval")
    if not train:
        msg = "the task has no prompts to train on"
        raise TaskError(msg)
    owner_of: dict[str, Prompt] = {}
    given: Sequence[object] = (*train, *held_out)  # a task of the user's own may give anything
    for prompt in given:
        if not isinstance(prompt, Prompt):
            msg = f"the task's prompts must be ratchet.types.Prompt, got {prompt!r}"
            raise TaskError(msg)
        other = owner_of.setdefault(prompt.prompt_id, prompt)
        if other is not prompt:
            msg = (
                f"the prompt id {prompt.prompt_id!r} is used twice, for {other.text!r} and"
                f" {prompt.text!r}; ids must be unique within the task"
            )
            raise TaskError(msg)
    texts = {prompt.text for prompt in train}
    for prompt in held_out:
        if prompt.text in texts:
            msg = f"the problem {prompt.text!r} is in both splits: it would be trained on"
            raise TaskError(msg)
    texts.update(prompt.text for prompt in held_out)
    return TaskSummary(len(train), len(held_out), len(texts), fingerprint(train))
