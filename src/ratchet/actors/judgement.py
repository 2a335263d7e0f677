"""What one step does with its batch: which groups it trains, and which of their tokens.

Consumes the groups that the buffer handed out, the lineage with the position of the weights that
take the step, and the marks of `buffer.batch_filter`; produces a `Judgement`. Pure: a group is
never changed, it is replaced by one with another `loss_mask`; waits for nothing.

The mask is all that says what is trained. It travels with the groups to every rank, and each of
them takes the loss, the statistics of the advantages and the number of tokens from it alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from ratchet.staleness import Lineage, Position
from ratchet.types import Packed, RolloutGroup

BATCH_FILTER: Final = "filter:batch"
"""The reason of a group of which the batch filter has left nothing."""


class BatchFilter(Protocol):
    """Code of the user's own that looks at a batch before it is trained."""

    async def marks(self, groups: Sequence[RolloutGroup]) -> Sequence[Sequence[bool]]:
        """Return for each group, for each of its rollouts, whether it is not to be trained.

        Raises:
            RunFailed: if the user's code fails, or returns something else.
        """
        ...

    def close(self) -> None:
        """Wait for nothing, and let go of everything."""
        ...


class Judgement(NamedTuple):
    """The batch as it is trained, and what became of the rest."""

    groups: tuple[RolloutGroup, ...]
    """the batch of the step; of some, every token may be masked"""
    rejected: Mapping[int, str]
    """group id -> why no token of it is trained: "stale" (it is not in `groups`), "filter:batch",
    or "no_tokens" (it came with an empty loss mask)"""
    masked_groups: int = 0
    """groups of `groups` that had tokens past the bound"""
    masked_tokens: int = 0
    """those tokens"""
    marked_samples: int = 0
    """rollouts that the batch filter has marked"""

    @property
    def trained(self) -> tuple[RolloutGroup, ...]:
        """The groups of which a token is trained."""
        return tuple(group for group in self.groups if group.group_id not in self.rejected)


def judge(
    groups: Iterable[RolloutGroup],
    lineage: Lineage,
    position: Position,
    max_staleness: int,
    *,
    mask: bool,
) -> Judgement:
    """Judge the staleness of a batch.

    Args:
        groups: as the buffer handed them out.
        lineage: knows every version of their tokens.
        position: of the weights that take the step.
        max_staleness: optimiser steps.
        mask: whether a group loses its tokens past the bound, or is rejected for one of them.

    Raises:
        UnknownVersion: if it does not.
    """
    kept: list[RolloutGroup] = []
    rejected: dict[int, str] = {}
    masked_groups = masked_tokens = 0
    for group in groups:
        left = lineage.mask_stale(group, position, max_staleness)
        if left is None or (left is not group and not mask):
            rejected[group.group_id] = "stale"
            continue
        kept.append(left)
        masked_groups += left is not group
        masked_tokens += group.num_trained_tokens - left.num_trained_tokens
    return _reject_empty(
        Judgement(tuple(kept), rejected, masked_groups, masked_tokens), "no_tokens"
    )


def mark(judged: Judgement, marks: Sequence[Sequence[bool]]) -> Judgement:
    """Take the marked samples out of a batch; it keeps its groups, and they their size.

    Args:
        judged: the batch so far.
        marks: for each of its groups, for each of the group's rollouts, whether it is out.
    """
    groups = tuple(map(_without_marked, judged.groups, marks))
    marked = judged._replace(groups=groups, marked_samples=sum(map(sum, marks)))
    return _reject_empty(marked, BATCH_FILTER)


def _reject_empty(judged: Judgement, reason: str) -> Judgement:
    empty = {group.group_id: reason for group in judged.trained if not group.num_trained_tokens}
    return judged._replace(rejected={**judged.rejected, **empty})


def _without_marked(group: RolloutGroup, marks: Sequence[bool]) -> RolloutGroup:
    if not any(marks):
        return group
    rollouts = tuple(
        msgspec.structs.replace(rollout, loss_mask=Packed("uint8", bytes(len(rollout.loss_mask))))
        if is_marked
        else rollout
        for rollout, is_marked in zip(group.rollouts, marks, strict=True)
    )
    return msgspec.structs.replace(group, rollouts=rollouts)
