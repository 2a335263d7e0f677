"""How a bucket is cut up: nothing is left out or sent twice."""

from __future__ import annotations

import pytest

from ratchet.transport.weights import pieces as module
from ratchet.transport.weights.base import TensorSpec
from ratchet.transport.weights.pieces import large_bytes, pieces_of
from ratchet.transport.weights.plan import make_manifest
from ratchet.types import WeightManifest


def manifest(*sizes: int) -> WeightManifest:
    specs = [TensorSpec(f"p{n}", "uint8", (size,)) for n, size in enumerate(sizes)]
    return make_manifest(specs, 10**6, term=1, version=1, step=1)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((10, 20), [(0, 128, "", 0)]),
        ((0, 0), [(0, 64, "", 0)]),
        ((100,), [(0, 100, "p0", 0)]),
        ((100, 130), [(0, 100, "p0", 0), (128, 258, "p1", 0)]),
        ((10, 100, 10, 10), [(0, 64, "", 0), (64, 164, "p1", 0), (192, 320, "", 0)]),
        ((0, 100, 0, 10, 0), [(0, 100, "p1", 0), (128, 192, "", 0)]),
        ((10, 0, 100, 0), [(0, 64, "", 0), (64, 164, "p2", 0)]),
        ((450,), [(0, 200, "p0", 0), (200, 400, "p0", 200), (400, 450, "p0", 400)]),
        ((10, 250), [(0, 64, "", 0), (64, 264, "p1", 0), (264, 314, "p1", 200)]),
        ((90, 90, 90), [(0, 200, "", 0), (200, 384, "", 0)]),
    ],
)
def test_a_bucket_is_cut_into_pieces(
    sizes: tuple[int, ...],
    expected: list[tuple[int, int, str, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 200)
    plan = manifest(*sizes)
    pieces = pieces_of(plan.slots, *plan.bucket_bytes, 100)
    assert list(pieces) == expected
    sent = {at for piece in pieces for at in range(piece.start, piece.end)}
    assert sum(piece.end - piece.start for piece in pieces) == len(sent), "nothing twice"
    for slot in plan.slots:
        assert sent.issuperset(range(slot.offset, slot.offset + slot.num_bytes))


def test_among_more_than_two_more_is_packed() -> None:
    assert large_bytes(2) < large_bytes(3) == large_bytes(100) == module.PIECE_BYTES
