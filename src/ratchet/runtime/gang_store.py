"""The store at which the nodes of a trainer meet: served by node 0, at one address only.

Consumes "HOST:PORT"; produces a TCPStore. Waits for node 0, for `MEET_S`.
"""

from __future__ import annotations

import socket
from contextlib import closing
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from ratchet.errors import ConfigError

MEET_S: Final = 600.0
"""Seconds in which all nodes of a trainer must have started."""
_dist: Final[Any] = dist
"""torch's stubs do not know `master_listen_fd`."""


def parse_endpoint(text: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT".

    Raises:
        ConfigError: if it is not of that form.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        msg = (
            f"the rendezvous {text!r} of a trainer with several nodes is not HOST:PORT: name an"
            " address of node 0 and a free port there"
        )
        raise ConfigError(msg)
    return host.removeprefix("[").removesuffix("]"), int(port)


def serve(host: str, port: int) -> Any:
    """Serve a store on one address only; torch's own server listens on all."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    with closing(listener):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            msg = (
                f"the rendezvous {host}:{port} cannot be bound: {error.strerror}; it must be an"
                " address of this machine, node 0 of the trainer, and a free port"
            )
            raise ConfigError(msg) from None
        listener.listen(128)
        return _dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=MEET_S),
            master_listen_fd=listener.detach(),
        )


def connect(host: str, port: int) -> Any:
    """Reach the store of node 0, as soon as there is one.

    Raises:
        RuntimeError: of torch, if that takes longer than `MEET_S`.
    """
    return _dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=MEET_S)
    )
