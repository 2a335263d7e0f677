"""Tensors in and out of buckets: one-dimensional uint8 tensors laid out by the manifest.

Consumes the trainer's tensors or a bucket that arrived, produces the bucket or views into it. Waits
for nothing. The gaps between tensors are zero, so that the digest of a bucket is a function of the
values alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Final

import torch

from ratchet.errors import TransferFailed
from ratchet.types import TensorSlot

_NONE: Final[Mapping[str, torch.Tensor]] = MappingProxyType({})
_PART_BYTES: Final = 2**20
"""What is copied before it is read: far less than the cache holds."""


def pack(
    bucket: torch.Tensor,
    slots: Sequence[TensorSlot],
    tensors: Sequence[torch.Tensor],
    left: Mapping[str, torch.Tensor] = _NONE,
) -> Iterator[Iterator[memoryview]]:
    """Copy tensors into their slots, from any device, and zero what lies between. Yields, for each
    slot, the bytes that then hold its values, part by part, each when it has been copied: who reads
    it at once finds it in the cache. A slot must be read to its end before the next one. Of a
    bucket on a device it yields nothing to read, and the copy may go on.

    Args:
        bucket: takes them.
        slots: of the bucket, by offset.
        tensors: one for each slot.
        left: what `flat_bytes` says of those that stay where they are, by name.

    Raises:
        TransferFailed: if a tensor is not what the manifest says; nothing is converted in silence.
    """
    on_host = bucket.device.type == "cpu"
    data = host_bytes(bucket) if on_host else memoryview(b"")
    end = 0
    for slot, tensor in zip(slots, tensors, strict=True):
        if tensor.shape != slot.shape or dtype_name(tensor) != slot.dtype:
            msg = (
                f"{slot.name} was announced as {slot.dtype}{list(slot.shape)} and read as"
                f" {dtype_name(tensor)}{list(tensor.shape)}"
            )
            raise TransferFailed(msg)
        if end < slot.offset:
            bucket[end : slot.offset].zero_()
        end = slot.offset + slot.num_bytes
        if slot.name in left:
            yield _parts(host_bytes(left[slot.name]))
        elif on_host and lies_on_host(tensor):
            yield _copied(flat_bytes(tensor), bucket[slot.offset : end], data[slot.offset : end])
        else:
            view(bucket, slot).copy_(tensor.detach(), non_blocking=not on_host)
            yield _parts(data[slot.offset : end])
    if end < len(bucket):
        bucket[end:].zero_()


def _parts(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), _PART_BYTES):
        yield data[start : start + _PART_BYTES]


def _copied(source: torch.Tensor, to: torch.Tensor, data: memoryview) -> Iterator[memoryview]:
    if len(data) <= _PART_BYTES:  # one of many: each further call to torch costs what this one does
        to.copy_(source)
        yield data
        return
    for start in range(0, len(data), _PART_BYTES):
        part = slice(start, start + _PART_BYTES)
        to[part].copy_(source[part])
        yield data[part]


def view(bucket: torch.Tensor, slot: TensorSlot) -> torch.Tensor:
    """Return the tensor that lies in a slot; it shares the bucket's memory."""
    data = bucket[slot.offset : slot.offset + slot.num_bytes]
    dtype: torch.dtype = getattr(torch, slot.dtype)
    return data.view(dtype).view(slot.shape)


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the dtype as manifests write it."""
    return _name_of(tensor.dtype)


@cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def lies_on_host(tensor: torch.Tensor) -> bool:
    """Return whether the bytes of a tensor lie in host memory, one after the other."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, without a copy where it is contiguous."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory, without a copy where it is contiguous there."""
    return flat_bytes(tensor).cpu().numpy().data


def slot_bytes(bucket: memoryview, slots: Iterable[TensorSlot]) -> Iterator[memoryview]:
    """Yield the bytes of each slot of a bucket."""
    for slot in slots:
        yield bucket[slot.offset : slot.offset + slot.num_bytes]
