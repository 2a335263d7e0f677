"""Fixtures of several suites. What loads torch is imported where it is used: few tests need it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ratchet.transport.weights import pieces

if TYPE_CHECKING:
    from tests.helpers.rollout_engines import Subject


@pytest.fixture
def layers_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of both kinds of pieces: large tensors, from where they are, and packed ones."""
    monkeypatch.setattr(pieces, "LARGE_BYTES", 2**17)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 2**18)


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that never stops by itself, so that lengths are known."""
    from tests.helpers.rollout_engines import CONTEXT
    from tests.helpers.tiny_models import write_tiny_model

    path = tmp_path_factory.mktemp("engine") / "model"
    return write_tiny_model(path, eos_token_id=[], max_position_embeddings=CONTEXT)


@pytest.fixture(params=["torch", "fake"])
def subject(request: pytest.FixtureRequest, endless_model: Path) -> Subject:
    """Each rollout engine."""
    from tests.helpers.rollout_engines import CONTEXT, Subject

    from ratchet.backends.rollout.fake import FakeEngine
    from ratchet.backends.rollout.torch import TorchEngine

    if request.param == "torch":
        return Subject(lambda: TorchEngine(endless_model, max_batch_size=16))
    return Subject(
        lambda: FakeEngine(context=CONTEXT, delay_s=lambda _, params: 0.001 * params.max_tokens)
    )
