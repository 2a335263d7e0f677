"""Packing: from groups of rollouts, or prompts and references, to padded micro-batches.

Consumes sequences of tokens, produces tensors for the forward pass; waits for nothing. Pure: the
same input gives the same micro-batches. Shapes: B rows, L tokens of the longest row, K columns that
hold completion tokens, P prompt tokens, C completion tokens.

Rows start at column 0 and are padded on the right. Under causal attention no token ever sees the
padding behind it, so there is no attention mask and positions count from 0: the cheapest forward
pass there is. The logits of column i predict token i + 1; only the last K = L - min(P) columns are
needed (`logits_to_keep`), which saves the logits of prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ratchet.algorithms.advantages import Advantage
from ratchet.types import Packed, PackedDtype, Rollout, RolloutGroup


class Row(NamedTuple):
    """One sequence to train on."""

    prompt_ids: Packed
    """int32 [P], P at least 1"""
    completion_ids: Packed
    """int32 [C], C at least 1"""
    behavior_logprobs: Packed
    """float32 [C]"""
    loss_mask: Packed
    """uint8 [C]"""
    advantage: float

    @property
    def num_tokens(self) -> int:
        """Prompt and completion together."""
        return len(self.prompt_ids) + len(self.completion_ids)


class MicroBatch(NamedTuple):
    """The tensors of one forward pass, on the CPU."""

    input_ids: Tensor
    """int64 [B, L - 1]: the last token of the longest row predicts nothing"""
    targets: Tensor
    """int64 [B, K]: what the last K columns predict"""
    loss_mask: Tensor
    """bool [B, K]: True where a completion token is trained"""
    behavior_logprobs: Tensor
    """float32 [B, K], 0 where there is no completion token"""
    advantages: Tensor
    """float32 [B, K]: the advantage of the row, in every column"""

    def to(self, device: torch.device) -> MicroBatch:
        """Return the same on a device."""
        return MicroBatch(*(tensor.to(device, non_blocking=True) for tensor in self))


def rollout_rows(groups: Iterable[RolloutGroup], advantage: Advantage) -> list[Row]:
    """Return a row for each rollout of which a token is trained, with the advantage of its
    trajectory within its group.

    A trajectory counts once in the statistics of its group, with its whole reward, however many
    rollouts it has and however many of its tokens are trained; not at all if none is. So
    `advantage` may be given fewer rewards than the group has trajectories, down to one.

    Raises:
        ValueError: if the lengths of a rollout's arrays differ, or its prompt or completion is
            empty. One that was aborted may be empty.
    """
    return [row for group in groups for row in _group_rows(group, advantage)]


def _group_rows(group: RolloutGroup, advantage: Advantage) -> Iterator[Row]:
    for rollout in group.rollouts:
        if rollout.completion_ids.data or rollout.finish_reason not in {"abort", "error"}:
            _check(_row(rollout, 0.0), group.group_id)
    trajectories = group.trained_trajectories
    if not trajectories:
        return
    rewards = np.array([trajectory[0].reward for trajectory in trajectories], dtype=np.float64)
    for trajectory, value in zip(trajectories, advantage(rewards), strict=True):
        yield from (_row(each, float(value)) for each in trajectory if each.num_trained_tokens)


def _row(rollout: Rollout, advantage: float) -> Row:
    return Row(
        rollout.prompt_ids,
        rollout.completion_ids,
        rollout.behavior_logprobs,
        rollout.loss_mask,
        advantage,
    )


def reference_row(prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> Row:
    """Return a row that trains every token of a known completion (SFT)."""
    row = Row(
        Packed.of(prompt_ids, "int32"),
        Packed.of(completion_ids, "int32"),
        Packed.of(np.zeros(len(completion_ids)), "float32"),
        Packed.of(np.ones(len(completion_ids)), "uint8"),
        1.0,
    )
    _check(row, None)
    return row


def trained_tokens(rows: Iterable[Row]) -> int:
    """Return how many tokens the loss masks select."""
    return sum(row.loss_mask.count_ones() for row in rows)


def plan_micro_batches(
    rows: Sequence[Row], max_tokens: int, num_ranks: int = 1
) -> list[list[list[Row]]]:
    """Cut a batch into micro-batches, each dealt to the ranks.

    Rows are sorted by length, longest first, so that those of one micro-batch need little padding.
    Each rank's share of a micro-batch has at most `max_tokens` padded tokens, or is a single row.

    Returns:
        micro-batch -> rank -> rows. Every rank has a share of every micro-batch, because all of
        them take part in its collectives; the share of a last rank may be empty.
    """
    ordered = sorted(rows, key=lambda row: row.num_tokens, reverse=True)
    plan = []
    start = 0
    while start < len(ordered):
        rows_per_rank = max(1, max_tokens // ordered[start].num_tokens)
        part = ordered[start : start + rows_per_rank * num_ranks]
        plan.append([part[rank::num_ranks] for rank in range(num_ranks)])
        start += len(part)
    return plan


def pad(rows: Sequence[Row]) -> MicroBatch:
    """Return the padded tensors of some rows."""
    prompts = np.array([len(row.prompt_ids) for row in rows])
    lengths = np.array([row.num_tokens for row in rows])
    length, first = int(lengths.max()), int(prompts.min())
    columns = np.arange(length)
    in_row = columns < lengths[:, None]
    in_completion = in_row & (columns >= prompts[:, None])

    ids = np.zeros((len(rows), length), dtype=np.int64)
    ids[in_row] = _flat("int32", [part for row in rows for part in row[:2]])
    logprobs = np.zeros((len(rows), length), dtype=np.float32)
    logprobs[in_completion] = _flat("float32", [row.behavior_logprobs for row in rows])
    mask = np.zeros((len(rows), length), dtype=np.bool_)
    mask[in_completion] = _flat("uint8", [row.loss_mask for row in rows]) == 1
    advantages = np.array([row.advantage for row in rows], dtype=np.float32)
    ids_tensor = torch.from_numpy(ids)
    return MicroBatch(
        input_ids=ids_tensor[:, :-1],
        targets=ids_tensor[:, first:],
        loss_mask=torch.from_numpy(mask[:, first:]),
        behavior_logprobs=torch.from_numpy(logprobs[:, first:]),
        advantages=torch.from_numpy(advantages)[:, None].expand(-1, length - first),
    )


def _flat(dtype: PackedDtype, arrays: Sequence[Packed]) -> npt.NDArray[Any]:
    # one array from all the bytes: far cheaper than one for each row
    return Packed(dtype, b"".join(array.data for array in arrays)).numpy()


def _check(row: Row, group_id: int | None) -> None:
    prompt, completion, logprobs, mask, _ = row
    dtypes = (prompt.dtype, completion.dtype, logprobs.dtype, mask.dtype)
    lengths = (len(completion), len(logprobs), len(mask))
    if (
        dtypes == ("int32", "int32", "float32", "uint8")
        and lengths == (lengths[0],) * 3
        and lengths[0]
        and prompt.data
    ):
        return
    msg = (
        f"{'a reference' if group_id is None else f'a rollout of group {group_id}'} has"
        f" {len(prompt)} tokens of prompt, {lengths[0]} of completion, {lengths[1]}"
        f" behavior_logprobs and {lengths[2]} values of loss_mask, as {', '.join(dtypes)}; it takes"
        " at least one token of each, as many values as completion tokens, and int32, int32,"
        " float32, uint8"
    )
    raise ValueError(msg)
