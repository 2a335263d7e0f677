"""Weight transports by name, imported only when one is opened.

Consumes the configuration, produces the two ends of a transport. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final, NamedTuple

from ratchet.config import WeightsConfig
from ratchet.errors import ConfigError
from ratchet.transport.weights.base import WeightReceiver, WeightSender, WeightSource


class _Transport(NamedTuple):
    module: str
    sender: str
    receiver: str


TRANSPORTS: Final[Mapping[str, _Transport]] = {
    "broadcast": _Transport(
        "ratchet.transport.weights.broadcast", "BroadcastSender", "BroadcastReceiver"
    ),
}
"""Both ends of each transport, by the name that a configuration gives it."""


def open_sender(config: WeightsConfig, host: str, source: WeightSource) -> WeightSender:
    """Open the trainer's end, on the rank that holds the whole parameters.

    Args:
        config: the section `weights`.
        host: the address to listen on.
        source: the model in training; its `read` is called on a thread of the sender.

    Raises:
        ConfigError: if the transport is unknown.
    """
    transport = _transport(config.transport)
    factory: Callable[[WeightsConfig, str, WeightSource], WeightSender]
    factory = _load(transport.module, transport.sender)
    return factory(config, host, source)


def open_receiver(config: WeightsConfig) -> WeightReceiver:
    """Open an engine's end.

    Raises:
        ConfigError: if the transport is unknown.
    """
    transport = _transport(config.transport)
    factory: Callable[[WeightsConfig], WeightReceiver]
    factory = _load(transport.module, transport.receiver)
    return factory(config)


def _transport(name: str) -> _Transport:
    if name not in TRANSPORTS:
        msg = f"weights.transport = {name!r} is unknown; known: {', '.join(sorted(TRANSPORTS))}"
        raise ConfigError(msg)
    return TRANSPORTS[name]


def _load(module: str, name: str) -> Any:
    return getattr(import_module(module), name)
