from __future__ import annotations

import pytest

from ratchet.transport.weights import pieces


@pytest.fixture
def layers_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of both kinds of pieces: large tensors, from where they are, and packed ones."""
    monkeypatch.setattr(pieces, "LARGE_BYTES", 2**17)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 2**18)
