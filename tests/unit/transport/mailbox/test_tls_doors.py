"""Where a node may listen, with which credentials, and where it needs none."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from tests.helpers.nodes import KEY, Town
from tests.helpers.tcp_towns import PLAIN, over_tcp

from ratchet.errors import ConfigError
from ratchet.messages import AbortLoad
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.credentials import Credentials
from ratchet.transport.mailbox.wire import SocketWire


@pytest.fixture
def outside() -> str:
    """An address of this machine that others could reach; nothing is sent there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but the loopback one")
        host = str(probe.getsockname()[0])
    return host


def test_no_door_to_the_network_without_credentials(outside: str, wire: SocketWire) -> None:
    async def scene(town: Town) -> None:
        there = Address("tcp", outside)
        open_door = town.build("a", address=there, wire=PLAIN)
        with pytest.raises(
            ConfigError, match=r"nothing keeps strangers out: give runtime\.token_f"
        ):
            await open_door.node.start()
        assert open_door.node._listener is None
        for name, credentials in (("a", Credentials(KEY)), ("b", Credentials(KEY))):
            await town.start(name, address=there, wire=SocketWire(credentials))
        town.hosts["a"].node.ref("b").tell(AbortLoad(0, 1, ""))
        await town.hosts["b"].inbox.has(1)
        await town.start("c", address=there, wire=wire)

    over_tcp(scene)


def test_a_door_has_an_ip_address(wire: SocketWire) -> None:
    async def scene(town: Town) -> None:
        a = town.build("a", address=Address.parse("tcp:node-7:1"), wire=wire)
        with pytest.raises(ConfigError, match="'node-7' is a name, for others to dial; to listen"):
            await a.node.start()
        b = town.build("b", address=Address.parse("tcp:192.0.2.1:0"), wire=wire)
        with pytest.raises(ConfigError, match=r"tcp:192\.0\.2\.1:0 cannot be bound"):
            await b.node.start()

    over_tcp(scene)


def test_unix_sockets_have_no_tls(wire: SocketWire, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)

    async def scene(town: Town) -> None:
        a = await town.start("a", address=Address.parse(f"unix:{tmp_path}/a"), wire=wire)
        b = await town.start("b", address=Address.parse(f"unix:{tmp_path}/b"), wire=PLAIN)
        b.node.ref("a").tell(AbortLoad(0, 1, ""))
        await a.inbox.has(1)

    over_tcp(scene)
