"""Tensors in and out of buckets: one-dimensional uint8 tensors laid out by the manifest.

Consumes the trainer's tensors or a bucket that arrived, produces the bucket or views into it. Waits
for nothing. The gaps between tensors are zero, so that the digest of a bucket is a function of the
values alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

import torch

from ratchet.errors import TransferFailed
from ratchet.types import TensorSlot

_PART_BYTES: Final = 2**20
"""What is copied before it is read: far less than the cache holds."""


def pack(
    bucket: torch.Tensor,
    slots: Sequence[TensorSlot],
    tensors: Sequence[torch.Tensor],
    leave: Collection[str] = (),
) -> Iterator[Iterator[torch.Tensor]]:
    """Copy tensors into their slots, from any device, and zero what lies between. Yields, for each
    slot, the bytes that then hold its values, part by part, each when it has been copied: who reads
    it at once finds it in the cache. A slot must be read to its end before the next one. On a
    device the copy may go on.

    Args:
        bucket: takes them.
        slots: of the bucket, by offset.
        tensors: one for each slot.
        leave: names of those that stay where they are.

    Raises:
        TransferFailed: if a tensor is not what the manifest says; nothing is converted in silence.
    """
    end = 0
    for slot, tensor in zip(slots, tensors, strict=True):
        if (dtype_name(tensor), tuple(tensor.shape)) != (slot.dtype, slot.shape):
            msg = (
                f"{slot.name} was announced as {slot.dtype}{list(slot.shape)} and read as"
                f" {dtype_name(tensor)}{list(tensor.shape)}"
            )
            raise TransferFailed(msg)
        if end < slot.offset:
            bucket[end : slot.offset].zero_()
        end = slot.offset + slot.num_bytes
        data = bucket[slot.offset : end]
        if slot.name in leave or (lies_on_host(data) and lies_on_host(tensor)):
            yield _parts(flat_bytes(tensor), None if slot.name in leave else data)
        else:
            on_device = bucket.device.type != "cpu"
            view(bucket, slot).copy_(tensor.detach(), non_blocking=on_device)
            yield iter((data,))
    if end < len(bucket):
        bucket[end:].zero_()


def _parts(source: torch.Tensor, to: torch.Tensor | None) -> Iterator[torch.Tensor]:
    for start in range(0, len(source), _PART_BYTES):
        part = source[start : start + _PART_BYTES]
        yield part if to is None else to[start : start + len(part)].copy_(part)


def view(bucket: torch.Tensor, slot: TensorSlot) -> torch.Tensor:
    """Return the tensor that lies in a slot; it shares the bucket's memory."""
    data = bucket[slot.offset : slot.offset + slot.num_bytes]
    dtype: torch.dtype = getattr(torch, slot.dtype)
    return data.view(dtype).view(slot.shape)


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the dtype as manifests write it."""
    return str(tensor.dtype).removeprefix("torch.")


def lies_on_host(tensor: torch.Tensor) -> bool:
    """Return whether the bytes of a tensor lie in host memory, one after the other."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, without a copy where it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory, without a copy where it is contiguous there."""
    return flat_bytes(tensor).cpu().numpy().data


def slot_bytes(bucket: memoryview, slots: Iterable[TensorSlot]) -> Iterator[memoryview]:
    """Yield the bytes of each slot of a bucket."""
    for slot in slots:
        yield bucket[slot.offset : slot.offset + slot.num_bytes]
