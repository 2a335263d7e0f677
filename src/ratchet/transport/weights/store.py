"""The store that a trainer serves, where the members of its process groups meet.

Consumes an address, produces a server or a client of torch's store. A client waits for the server,
unblocked by its deadline or by the check that it is given.
"""

from __future__ import annotations

import socket
from contextlib import closing
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from torch import distributed as dist

from ratchet.errors import TransferFailed
from ratchet.transport.weights.deadline import Deadline
from ratchet.transport.weights.groups import called

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import TCPStore

_c10d: Final[Any] = dist
"""torch's stubs and its own process groups disagree."""

_CONNECT: Final = timedelta(seconds=1)
"""One try to connect to a store, after which it is asked again whether anybody listens."""


def serve_store(host: str) -> tuple[TCPStore, str, int]:
    """Serve a store on one address and a port that the system chooses.

    torch's own server listens on all addresses, whatever host it is given; so the socket is bound
    here.

    Returns:
        The store, the numeric address and the port.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    with closing(listener):
        listener.bind(address)
        listener.listen(128)
        bound, port = listener.getsockname()[:2]
        store: TCPStore = _c10d.TCPStore(
            bound,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return store, bound, port


def connect_store(
    host: str, port: int, deadline: Deadline, check: Callable[[], None]
) -> tuple[TCPStore, str]:
    """Connect to a store; `check` is called before each try, and raises to end them.

    torch's handshake has no timeout. If the trainer stands still in that very moment, this thread
    does too, until the trainer goes on or dies; the event loop does not wait for it. Nor does
    torch's timeout end the reverse DNS query that it makes for the text of its own log, loopback
    included: where the answer is lost, the connection takes as long as the resolver waits (5 s by
    default), and torch then says that it timed out. So there is another try.

    Returns:
        The store, and this end's own address towards it.

    Raises:
        TransferFailed: if nobody serves there.
    """
    while True:
        check()
        try:  # torch goes on trying until its timeout where nobody listens
            with socket.create_connection((host, port), timeout=deadline.left_s or 0.001) as probe:
                address: str = probe.getsockname()[0]
        except OSError as error:
            msg = f"no trainer serves weights at {host}:{port}: {error.strerror or error}"
            raise TransferFailed(msg) from None
        try:
            store: TCPStore = called(
                partial(
                    _c10d.TCPStore,
                    host,
                    port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=min(deadline.left, _CONNECT),
                )
            )
        except TransferFailed as error:  # it may have gone meanwhile, or one of the two is slow
            if not deadline.left_s:
                msg = (
                    f"could not connect to the trainer's store at {host}:{port} within"
                    f" {deadline.timeout_s:.3g} s; the last try: {error}"
                )
                raise TransferFailed(msg) from None
        else:
            return store, address
