"""One connection, where it is told apart from its node."""

from __future__ import annotations

import socket
from typing import Any

from ratchet.transport.mailbox.connection import _bound_buffers


class GoneTransport:
    """Of a peer that has reset the connection as soon as it was made."""

    def __init__(self, found: socket.socket) -> None:
        self._found = found

    def get_extra_info(self, name: str) -> Any:
        return {"socket": self._found, "peername": None}[name]


def test_a_peer_that_is_gone_already_is_no_error_here() -> None:
    with socket.socket() as found:
        _bound_buffers(GoneTransport(found))  # type: ignore[arg-type]
        assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) > 0
