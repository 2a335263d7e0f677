"""Rollouts and groups that differ in what a verdict looks at, and code as a user writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ratchet.types import FinishReason, Packed, Rollout, RolloutGroup, VersionSpan


def sample(
    reward: float = 0.0,
    *versions: int,
    length: int | None = None,
    finish: FinishReason = "stop",
    trajectory: int | None = None,
) -> Rollout:
    """One rollout with a token of each version (of version 0: `length` of them, 2 by default)."""
    tokens = versions or (0,) * (2 if length is None else length)
    return Rollout(
        prompt_ids=Packed.of([3], "int32"),
        completion_ids=Packed.of([4] * len(tokens), "int32"),
        behavior_logprobs=Packed.of([-1.0] * len(tokens), "float32"),
        loss_mask=Packed("uint8", b"\1" * len(tokens)),
        spans=tuple(VersionSpan(v, at, at + 1) for at, v in enumerate(tokens)),
        finish_reason=finish,
        reward=reward,
        seed=0,
        trajectory=trajectory,
    )


def group_of(*rollouts: Rollout) -> RolloutGroup:
    """A group of these rollouts."""
    return RolloutGroup(0, 0, "p0", 0, rollouts)


def trained_tokens(group: RolloutGroup) -> list[int]:
    """The number of trained tokens of each rollout."""
    return [sum(rollout.loss_mask.data) for rollout in group.rollouts]


def user_code(folder: Path, body: str, **names: Any) -> str:
    """Write a function `own` of one argument `x`, and return how a configuration names it."""
    file = folder / f"user_code_{abs(hash(body))}.py"
    file.write_text(f"def own(x):\n    {body.format(**names)}\n")
    return f"{file}:own"
