import socket

import pytest

from ratchet.errors import ConfigError
from ratchet.runtime.gang_store import connect, parse_endpoint, serve


def test_a_store_is_served_at_one_address_and_reached_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = serve("127.0.0.1", port)
    assert server.port == port
    connect("127.0.0.1", port).set("key", "value")
    assert server.get("key") == b"value"
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} cannot be bound.*a free port"):
        serve("127.0.0.1", port)


def test_an_address_of_another_machine_cannot_be_served() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.77:4711 cannot be bound"):
        serve("192.0.2.77", 4711)


def test_endpoints() -> None:
    assert parse_endpoint("node-0:29400") == ("node-0", 29400)
    assert parse_endpoint("[fd00::1]:29400") == ("fd00::1", 29400)
    for text in ("", "29400", "node-0:", "node-0:port", ":29400"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            parse_endpoint(text)
