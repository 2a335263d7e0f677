"""Tensors in and out of buckets."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.weights import make_tensors, pack_all, specs_of

from ratchet.errors import TransferFailed
from ratchet.transport.weights.base import TensorSpec
from ratchet.transport.weights.buckets import host_bytes, slot_bytes, view
from ratchet.transport.weights.plan import make_manifest, slots_by_bucket


@pytest.mark.parametrize("bucket_bytes", [1, 100_000, 2**26])
def test_what_is_packed_comes_out_bit_for_bit(bucket_bytes: int) -> None:
    tensors = make_tensors(3)
    tensors["negative zero and nan"] = torch.tensor([-0.0, float("nan"), float("inf")])
    manifest = make_manifest(specs_of(tensors, {}), bucket_bytes, term=0, version=0, step=0)
    for slots, size in zip(slots_by_bucket(manifest), manifest.bucket_bytes, strict=True):
        bucket = torch.full((size,), 255, dtype=torch.uint8)
        pack_all(bucket, slots, [tensors[slot.name] for slot in slots])
        for slot in slots:
            out = view(bucket, slot)
            assert out.dtype == tensors[slot.name].dtype
            assert out.shape == tensors[slot.name].shape
            assert bytes(host_bytes(out)) == bytes(host_bytes(tensors[slot.name]))
        parts = [host_bytes(tensors[slot.name]) for slot in slots]
        assert sum(map(sum, parts)) == sum(host_bytes(bucket)), (
            "reused memory leaves nothing behind"
        )
        assert [bytes(part) for part in slot_bytes(host_bytes(bucket), slots)] == [
            bytes(part) for part in parts
        ]


def test_views_share_the_bucket() -> None:
    manifest = make_manifest([TensorSpec("a", "float32", (4,))], 64, term=0, version=0, step=0)
    bucket = torch.zeros(64, dtype=torch.uint8)
    view(bucket, manifest.slots[0]).fill_(1.0)
    assert bucket[:16].view(torch.float32).tolist() == [1.0] * 4


def test_a_transposed_tensor_is_packed_by_value() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    manifest = make_manifest([TensorSpec("a", "float32", (3, 2))], 64, term=0, version=0, step=0)
    bucket = torch.zeros(64, dtype=torch.uint8)
    pack_all(bucket, manifest.slots, [tensor])
    assert torch.equal(view(bucket, manifest.slots[0]), tensor)
    assert bytes(host_bytes(tensor)) == bytes(host_bytes(tensor.contiguous()))


def test_a_parameter_that_wants_gradients_is_packed() -> None:
    tensor = torch.nn.Parameter(torch.ones(4))
    manifest = make_manifest([TensorSpec("a", "float32", (4,))], 64, term=0, version=0, step=0)
    bucket = torch.zeros(64, dtype=torch.uint8)
    pack_all(bucket, manifest.slots, [tensor])
    assert not view(bucket, manifest.slots[0]).requires_grad
    assert tensor.requires_grad


@pytest.mark.parametrize("tensor", [torch.ones(4, dtype=torch.float64), torch.ones(2, 2)])
def test_nothing_is_converted_in_silence(tensor: torch.Tensor) -> None:
    manifest = make_manifest([TensorSpec("a", "float32", (4,))], 64, term=0, version=0, step=0)
    with pytest.raises(TransferFailed, match=r"a was announced as float32\[4\] and read as float"):
        pack_all(torch.zeros(64, dtype=torch.uint8), manifest.slots, [tensor])
