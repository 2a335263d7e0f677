"""Transports by name, and nothing heavy before one is opened."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.helpers.weights import FakeSource, make_tensors

from ratchet.config import WeightsConfig
from ratchet.errors import ConfigError
from ratchet.transport.weights.registry import open_receiver, open_sender


def test_an_unknown_transport_is_refused_with_the_known_ones() -> None:
    config = WeightsConfig(transport="pigeon")
    source = FakeSource(make_tensors(1))
    with pytest.raises(ConfigError, match=r"weights\.transport = 'pigeon'.* one of broadcast"):
        open_sender(config, "127.0.0.1", source)
    with pytest.raises(ConfigError, match=r"weights\.transport = 'pigeon'.* one of broadcast"):
        open_receiver(config)


def test_a_transport_of_the_users_own() -> None:
    config = WeightsConfig(transport="ratchet.transport.weights.broadcast:transport")
    assert type(open_receiver(config)) is type(open_receiver(WeightsConfig()))


def test_something_else_than_a_transport_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'builtins:dict' returned \{\}, not a Transport"):
        open_receiver(WeightsConfig(transport="builtins:dict"))


def test_nccl_without_a_device_is_a_mistake_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"weights\.backend = 'nccl': NCCL needs a CUDA device"):
        open_sender(WeightsConfig(backend="nccl"), "127.0.0.1", FakeSource(make_tensors(1)))


def test_names_and_plans_load_no_torch() -> None:
    code = (
        "import sys, ratchet.transport.weights.registry, ratchet.transport.weights.plan,"
        " ratchet.transport.weights.digest, ratchet.transport.weights.base;"
        " sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
