"""How a bucket travels through a group of processes: in which pieces. Pure, without torch.

Consumes the slots of a bucket, produces its pieces: each large tensor for itself, so that its owner
can send it from where it is, and what lies between two of them in one. Waits for nothing. Both ends
derive the same pieces from the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from ratchet.types import TensorSlot

LARGE_BYTES: Final = 2**20
"""A tensor of at least this size is a piece of its own: to copy it costs more than an operation."""


class Piece(NamedTuple):
    """A part of a bucket: the bytes [start, end)."""

    start: int
    end: int
    slots: tuple[TensorSlot, ...]
    """what lies there, by offset"""
    large: str = ""
    """name of the large tensor that this is, if it is one; any other slots here are empty"""


def pieces_of(
    slots: Sequence[TensorSlot], num_bytes: int, *, split: bool = True
) -> tuple[Piece, ...]:
    """Return the pieces of a bucket, in order; none is empty.

    Args:
        slots: of the bucket, by offset.
        num_bytes: its size.
        split: False for one piece, whatever its tensors.
    """
    if not split:
        return (Piece(0, num_bytes, tuple(slots)),)
    pieces: list[Piece] = []
    end = num_bytes
    for group in reversed(list(_groups(slots))):
        first = next((slot for slot in group if slot.num_bytes), None)
        start = 0 if first is None else first.offset
        if first is not None and _is_large(first):
            pieces.append(Piece(start, start + first.num_bytes, group, first.name))
        else:
            pieces.append(Piece(start, end, group))
        end = start
    return tuple(reversed(pieces))


def _groups(slots: Sequence[TensorSlot]) -> Iterator[tuple[TensorSlot, ...]]:
    group: list[TensorSlot] = []
    for slot in slots:
        filled = [other for other in group if other.num_bytes]
        if filled and slot.num_bytes and (_is_large(slot) or _is_large(filled[0])):
            yield tuple(group)
            group = []
        group.append(slot)
    yield tuple(group)


def _is_large(slot: TensorSlot) -> bool:
    return slot.num_bytes >= LARGE_BYTES
