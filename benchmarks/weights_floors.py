"""What wire and memory allow: the floors of the benchmark of weight sync.

Each moves the bytes of a version and does nothing else, or computes their digests as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch import distributed as dist

from ratchet.transport.weights.digest import digest_of


class Floor(msgspec.Struct, tag=True):
    kind: str
    sizes: tuple[int, ...]
    digests: bool


def bare_group(store: Any, rank: int, size: int) -> Any:
    return dist.ProcessGroupGloo(dist.PrefixStore("bare", store), rank, size, timedelta(minutes=5))


class Buffers:
    """Two for a floor to use in turns, kept from one to the next."""

    def __init__(self) -> None:
        self._held: list[torch.Tensor] = []

    def of(self, size: int) -> list[torch.Tensor]:
        if not self._held or len(self._held[0]) < size:
            self._held = [torch.full((size,), 1, dtype=torch.uint8) for _ in range(2)]
        return self._held


def bare_loop(group: Any, floor: Floor, buffers: Sequence[torch.Tensor]) -> None:
    """Move buckets one by one; with digests, compute one of each at either end, of what travels at
    the sender and of the bucket before at a receiver.
    """
    sends, before = group.rank() == 0, None
    for number, size in enumerate(floor.sizes):
        bucket = buffers[number % 2][:size]
        works = begin(group, floor.kind, bucket)
        if floor.digests and (sends or before is not None):
            digest_of(memoryview((bucket if sends else before).numpy()))
        for work in works:
            work.wait()
        before = bucket
    if floor.digests and not sends and before is not None:
        digest_of(memoryview(before.numpy()))


def begin(group: Any, kind: str, bucket: torch.Tensor) -> list[Any]:
    if kind == "broadcast":
        return [group.broadcast([bucket], dist.BroadcastOptions())]
    if group.rank():
        return [group.recv([bucket], 0, 0)]
    return [group.send([bucket], rank, 0) for rank in range(1, group.size())]


def copy_model(tensors: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> None:
    """Write every parameter once, from one buffer after another, as a load does."""
    start = 0
    for tensor in tensors.values():
        size = tensor.numel() * tensor.element_size()
        if start + size > len(buffer):
            start = 0
        tensor.view(-1).view(torch.uint8).copy_(buffer[start : start + size])
        start += size
