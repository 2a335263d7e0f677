"""How a bucket is cut up: what is large travels alone, and nothing is left out or sent twice."""

from __future__ import annotations

import pytest

from ratchet.transport.weights import pieces as module
from ratchet.transport.weights.base import TensorSpec
from ratchet.transport.weights.pieces import pieces_of
from ratchet.transport.weights.plan import make_manifest
from ratchet.types import WeightManifest


def manifest(*sizes: int) -> WeightManifest:
    specs = [TensorSpec(f"p{n}", "uint8", (size,)) for n, size in enumerate(sizes)]
    return make_manifest(specs, 10**6, term=1, version=1, step=1)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((10, 20), [(0, 128, "")]),
        ((0, 0), [(0, 64, "")]),
        ((100,), [(0, 100, "p0")]),
        ((100, 130), [(0, 100, "p0"), (128, 258, "p1")]),
        ((10, 100, 10, 10), [(0, 64, ""), (64, 164, "p1"), (192, 320, "")]),
        ((0, 100, 0, 10, 0), [(0, 100, "p1"), (128, 192, "")]),
        ((10, 0, 100, 0), [(0, 64, ""), (64, 164, "p2")]),
    ],
)
def test_what_is_large_travels_alone(
    sizes: tuple[int, ...],
    expected: list[tuple[int, int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LARGE_BYTES", 100)
    plan = manifest(*sizes)
    pieces = pieces_of(plan.slots, *plan.bucket_bytes)
    assert [(piece.start, piece.end, piece.large) for piece in pieces] == expected
    assert tuple(slot for piece in pieces for slot in piece.slots) == plan.slots
    for piece in pieces:
        for slot in piece.slots:
            if slot.num_bytes:
                assert piece.start <= slot.offset
                assert slot.offset + slot.num_bytes <= piece.end
    (one,) = pieces_of(plan.slots, *plan.bucket_bytes, split=False)
    assert one == (0, *plan.bucket_bytes, plan.slots, "")
