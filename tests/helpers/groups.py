"""Groups and batches of a chosen size, for the tests of the mailbox transport."""

from __future__ import annotations

from ratchet.messages import BatchReady, GroupFinished
from ratchet.stats import BufferStats
from ratchet.types import (
    Batch,
    Packed,
    Rollout,
    RolloutGroup,
    RolloutStats,
    VersionSpan,
)


def rollout(num_tokens: int, seed: int = 0) -> Rollout:
    """A rollout with arrays of 4 bytes a token; they differ by seed."""

    def array(what: int) -> bytes:
        return (bytes(range(251)) * (num_tokens // 60 + 1))[seed + what :][: 4 * num_tokens]

    return Rollout(
        prompt_ids=Packed("int32", b"\1\0\0\0"),
        completion_ids=Packed("int32", array(1)),
        behavior_logprobs=Packed("float32", array(2)),
        loss_mask=Packed("uint8", b""),
        spans=(VersionSpan(1, 0, num_tokens),),
        finish_reason="stop",
        reward=1.0,
        seed=seed,
    )


def finished(*sizes: int) -> GroupFinished:
    """A group with a rollout of each number of tokens."""
    rollouts = tuple(rollout(size, seed) for seed, size in enumerate(sizes))
    return GroupFinished("w", "i", RolloutGroup(1, 0, "p", 0, rollouts), RolloutStats("w", "i"))


def ready(*sizes: int) -> BatchReady:
    """A batch with a group of two rollouts for each number of tokens."""
    groups = tuple(finished(size, size).group for size in sizes)
    return BatchReady(1, Batch(1, groups), BufferStats())
