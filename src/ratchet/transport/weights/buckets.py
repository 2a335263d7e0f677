"""Tensors in and out of buckets: one-dimensional uint8 tensors laid out by the manifest.

Consumes the trainer's tensors or a bucket that arrived, produces the bucket or views into it. Waits
for nothing. The gaps between tensors are zero, so that the digest of a bucket is a function of the
values alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from ratchet.errors import TransferFailed
from ratchet.types import TensorSlot


def pack(
    bucket: torch.Tensor,
    slots: Sequence[TensorSlot],
    tensors: Sequence[torch.Tensor],
    leave: Collection[str] = (),
) -> Iterator[torch.Tensor]:
    """Copy tensors into their slots, from any device, and zero what lies between. Yields what then
    holds the values of each slot: who reads it at once finds it in the cache. In host memory the
    copy has ended by then.

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
        if slot.name in leave:
            yield tensor.detach()
        else:
            on_device = bucket.device.type != "cpu"
            yield view(bucket, slot).copy_(tensor.detach(), non_blocking=on_device)
    if end < len(bucket):
        bucket[end:].zero_()


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
