from __future__ import annotations

from itertools import pairwise

import pytest
from tests.helpers.weights import make_tensors, specs_of

from ratchet.errors import WeightsMismatch
from ratchet.transport.weights.digest import make_trailer, trailer_digest, whole_digest
from ratchet.transport.weights.outside import stretches_of
from ratchet.transport.weights.plan import ITEM_BYTES, make_manifest, slots_by_bucket
from ratchet.types import TensorSlot, WeightManifest


def manifest(version: int = 1) -> WeightManifest:
    specs = specs_of(make_tensors(1), {})
    return make_manifest(specs, 2**17, term=1, version=version, step=1)


def test_a_stretch_has_no_gap_and_no_tensor_in_it_is_unaligned() -> None:
    for slots in slots_by_bucket(manifest()):
        stretches = stretches_of(slots)
        assert [slot for stretch in stretches for slot in stretch.slots] == [
            s for s in slots if s.num_bytes
        ]
        for stretch in stretches:
            end = 0
            for slot in stretch.slots:
                assert stretch.start + end == slot.offset
                assert end % ITEM_BYTES[slot.dtype] == 0
                end += slot.num_bytes
            assert stretch.end == stretch.start + end
        assert all(before.end < after.start for before, after in pairwise(stretches))


def test_tensors_that_end_where_the_next_begins_travel_as_one() -> None:
    slots = [
        TensorSlot("a", "bfloat16", (32,), 0, 0, 64),
        TensorSlot("nothing", "bfloat16", (0,), 0, 64, 0),
        TensorSlot("b", "float32", (17,), 0, 64, 68),
        TensorSlot("c", "float32", (1,), 0, 192, 4),
    ]
    assert [(stretch.start, stretch.end) for stretch in stretches_of(slots)] == [
        (0, 132),
        (192, 196),
    ]


def test_a_bucket_of_nothing_has_no_stretch() -> None:
    assert stretches_of([TensorSlot("nothing", "bfloat16", (0, 3), 0, 0, 0)]) == ()


def test_a_trailer_tells_the_digest_of_its_version_alone() -> None:
    plan = manifest()
    digests = [bytes([n]) * 16 for n in range(len(plan.bucket_bytes))]
    trailer = make_trailer(plan, digests)
    assert trailer_digest(plan, trailer) == whole_digest(digests)
    with pytest.raises(WeightsMismatch, match="version 1 of term 1 arrived"):
        trailer_digest(manifest(2), trailer)
    with pytest.raises(WeightsMismatch, match=f"has {len(trailer) - 1} bytes"):
        trailer_digest(plan, trailer[:-1])
