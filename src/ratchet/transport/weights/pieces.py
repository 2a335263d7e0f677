"""How a bucket travels through a group of processes: in which pieces. Pure, without torch.

Consumes the slots of a bucket, produces its pieces. Large tensors are apart from what lies between
them, so that their owner can send them from where they are. Waits for nothing. Both ends derive the
same pieces from the manifest and the size of the group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from ratchet.transport.weights.plan import align
from ratchet.types import TensorSlot

_PAIR: Final = 2
LARGE_BYTES: Final = 2**20
"""Between two, a tensor of at least this size is sent from where it is: to copy it costs more than
an operation."""

PIECE_BYTES: Final = 2**24
"""No piece is larger, so that what has arrived is read, in the cache, while the next one travels.
Among more than two a tensor is copied if it is smaller: gloo's broadcast of 1 MiB costs twice the
CPU per byte that one of 16 MiB does (3 receivers on 2 cores)."""


class Piece(NamedTuple):
    """A part of a bucket: the bytes [start, end)."""

    start: int
    end: int
    large: str = ""
    """name of the large tensor that it is a part of, if it is one"""
    offset: int = 0
    """where in that tensor it begins"""


def large_bytes(world_size: int) -> int:
    """Return the size from which on a group of so many leaves a tensor where it is."""
    return LARGE_BYTES if world_size <= _PAIR else PIECE_BYTES


def pieces_of(slots: Sequence[TensorSlot], num_bytes: int, large: int) -> tuple[Piece, ...]:
    """Return the pieces of a bucket, in order; none is empty, and only gaps are left out.

    Args:
        slots: of the bucket, by offset.
        num_bytes: its size.
        large: what `large_bytes` says.
    """
    return tuple(
        Piece(at, min(at + PIECE_BYTES, end), name, at - start if name else 0)
        for start, end, name in _regions(slots, num_bytes, large)
        for at in range(start, end, PIECE_BYTES)
    )


def _regions(
    slots: Sequence[TensorSlot], num_bytes: int, large: int
) -> Iterator[tuple[int, int, str]]:
    packed = 0
    """where what is no large tensor begins"""
    for slot in slots:
        if slot.num_bytes < large:
            continue
        end = slot.offset + slot.num_bytes
        yield packed, slot.offset, ""
        yield slot.offset, end, slot.name
        packed = align(end)
    yield packed, num_bytes, ""
