"""Weight transports by name, imported only when one is opened.

Consumes the configuration, produces the two ends of a transport. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeAlias

from ratchet.config import WeightsConfig
from ratchet.errors import ConfigError
from ratchet.imports import import_chosen
from ratchet.transport.weights.base import WeightReceiver, WeightSender, WeightSource

OpenSender: TypeAlias = Callable[[WeightsConfig, str, WeightSource], WeightSender]
OpenReceiver: TypeAlias = Callable[[WeightsConfig], WeightReceiver]


class Transport(NamedTuple):
    """Both ends of a transport."""

    open_sender: OpenSender
    open_receiver: OpenReceiver


TRANSPORTS: Final[Mapping[str, str]] = {
    "broadcast": "ratchet.transport.weights.broadcast:transport",
    "p2p": "ratchet.transport.weights.p2p:transport",
    "direct": "ratchet.transport.weights.direct:transport",
}
"""Name in a configuration -> function without arguments that returns a `Transport`."""


def open_sender(config: WeightsConfig, host: str, source: WeightSource) -> WeightSender:
    """Open the trainer's end, on the rank that holds the whole parameters.

    Args:
        config: the section `weights`.
        host: the address to listen on.
        source: the model in training; its `read` is called on a thread of the sender.

    Raises:
        ConfigError: if the transport is unknown, or cannot run here as configured.
    """
    return _transport(config).open_sender(config, host, source)


def open_receiver(config: WeightsConfig) -> WeightReceiver:
    """Open an engine's end.

    Raises:
        ConfigError: if the transport is unknown.
    """
    return _transport(config).open_receiver(config)


def _transport(config: WeightsConfig) -> Transport:
    field = "weights.transport"
    transport = import_chosen(field, config.transport, TRANSPORTS)()
    if not isinstance(transport, Transport):
        msg = f"{field} = {config.transport!r} returned {transport!r}, not a Transport"
        raise ConfigError(msg)
    return transport
