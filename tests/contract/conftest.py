"""Fixtures of several suites. What loads torch is imported where it is used: few tests need it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ratchet.transport.weights import pieces
from ratchet.types import RolloutGroup

if TYPE_CHECKING:
    from tests.helpers.gang import SecondRank
    from tests.helpers.rollout_engines import Subject
    from tests.helpers.training_backends import Harness


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


@pytest.fixture(scope="module")
def second_rank() -> Iterator[SecondRank]:
    from tests.helpers.gang import SecondRank

    second = SecondRank()
    yield second
    second.stop()


@pytest.fixture(params=["fake", "fsdp", "two ranks", "lora", "lora, two ranks"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Harness:
    """Each training backend."""
    from tests.helpers.training_backends import Harness

    second = request.getfixturevalue("second_rank") if "two ranks" in request.param else None
    return Harness(request.param, tmp_path, second)


@pytest.fixture
def groups() -> list[RolloutGroup]:
    from tests.helpers.training import make_groups

    return make_groups()
