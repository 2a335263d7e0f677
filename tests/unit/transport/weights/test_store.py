"""Where a store listens, and how long a client tries."""

from __future__ import annotations

import socket
from time import monotonic

import pytest

from ratchet.errors import TransferFailed
from ratchet.transport.weights import store as store_module
from ratchet.transport.weights.deadline import Deadline
from ratchet.transport.weights.store import connect_store, serve_store

HOST = "127.0.0.1"


def test_a_store_is_served_on_one_address_only() -> None:
    store, host, port = serve_store(HOST)
    assert host == HOST
    with (
        socket.socket() as other,
        pytest.raises(ConnectionRefusedError),
    ):
        other.connect(("127.0.0.2", port))
    client, address = connect_store(HOST, port, Deadline(5.0), lambda: None)
    client.set("key", "value")
    assert store.get("key") == b"value"
    assert address == HOST


def test_a_store_that_stands_still_is_named_with_the_whole_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(connect: object) -> None:
        msg = "the client socket has timed out"
        raise TransferFailed(msg)

    store, host, port = serve_store(HOST)
    monkeypatch.setattr(store_module, "called", late)
    with pytest.raises(TransferFailed, match=rf"at {HOST}:{port} within 0\.2 s; .* timed out"):
        connect_store(host, port, Deadline(0.2), lambda: None)
    del store


def test_a_store_that_is_not_there_is_no_long_wait() -> None:
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    start = monotonic()
    with pytest.raises(TransferFailed, match=f"no trainer serves weights at {HOST}:{port}"):
        connect_store(HOST, port, Deadline(60.0), lambda: None)
    assert monotonic() - start < 10
