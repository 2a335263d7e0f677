"""One staging buffer of the trainer: how a bucket gets into it, and out again in pieces.

Consumes the slots of a bucket and the trainer's tensors, produces pieces in host memory, in the
buffer or where the tensors are, and the digests of the slots. Waits for nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from ratchet.transport.weights.buckets import (
    flat_bytes,
    host_bytes,
    lies_on_host,
    pack,
    slot_bytes,
)
from ratchet.transport.weights.digest import digest_of_parts, digests_of
from ratchet.transport.weights.pieces import pieces_of

if TYPE_CHECKING:
    import torch

    from ratchet.types import TensorSlot

_NEWS_BYTES: Final = 2**22
"""How much is gathered before anybody is told."""


class Gathered:
    """A staging buffer and the bucket that travels from there."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.part: int | None = None
        """which bucket, once it has begun"""
        self.pieces: Sequence[torch.Tensor] = ()
        """uint8, as `pieces_of` has them: in this memory, or where the trainer's tensors are"""
        self.ends: Sequence[int] = ()
        """where in the bucket each of them ends, and the last one with the bucket"""
        self.num_ready = 0
        """pieces that are gathered"""

    def fill(
        self,
        slots: Sequence[TensorSlot],
        num_bytes: int,
        tensors: Sequence[torch.Tensor],
        tell: Callable[[int], None],
        *,
        large: int,
        in_place: bool,
    ) -> tuple[bytes, ...]:
        """Gather a bucket.

        Args:
            slots: of the bucket, by offset.
            num_bytes: its size.
            tensors: one for each slot.
            tell: called with the number of pieces that are there, meanwhile. The last one is not
                there before its digest is, as what follows the last bucket is made of those.
            large: what `large_bytes` says.
            in_place: leave large tensors in host memory where they are.

        Returns:
            The digest of each slot.

        Raises:
            TransferFailed: if a tensor is not what its slot says.
        """
        bucket = self.memory[:num_bytes]
        if bucket.device.type != "cpu":
            for parts in pack(bucket, slots, tensors):
                list(parts)
            self.pieces, self.ends = [bucket], [num_bytes]
            return digests_of(slot_bytes(host_bytes(bucket), slots))  # one copy to the host for all
        left: dict[str, torch.Tensor] = {}
        if in_place:
            left = {
                slot.name: flat_bytes(tensor)
                for slot, tensor in zip(slots, tensors, strict=True)
                if slot.num_bytes >= large and lies_on_host(tensor)
            }
        pieces = pieces_of(slots, num_bytes, large)
        self.pieces = [
            left[piece.large][piece.offset : piece.offset + piece.end - piece.start]
            if piece.large in left
            else bucket[piece.start : piece.end]
            for piece in pieces
        ]
        self.ends = [*(piece.end for piece in pieces[:-1]), num_bytes]
        packed = zip(slots, pack(bucket, slots, tensors, left), strict=True)
        return tuple(
            digest_of_parts(self._telling(slot.offset, parts, tell)) for slot, parts in packed
        )

    def _telling(
        self, end: int, parts: Iterable[memoryview], tell: Callable[[int], None]
    ) -> Iterator[memoryview]:
        """Yield the parts of a slot, and tell how far the bucket has been gathered."""
        for each in parts:
            yield each
            end += len(each)
            told = self.ends[self.num_ready - 1] if self.num_ready else 0
            if end - told >= _NEWS_BYTES:
                tell(bisect_right(self.ends[:-1], end))
