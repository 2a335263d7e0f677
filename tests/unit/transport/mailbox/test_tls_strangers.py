"""What strangers at a TLS door can do: dawdle, crowd, send noise, change bytes on the way."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING

from tests.helpers.tcp_towns import ask, over_tcp, until

from ratchet.messages import AbortLoad, VersionBurnt
from ratchet.transport.mailbox import tls
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.wire import SocketWire

if TYPE_CHECKING:
    import pytest
    from tests.helpers.nodes import Town


def test_a_stranger_that_does_not_finish_its_handshake_is_shown_out(wire: SocketWire) -> None:
    async def scene(town: Town) -> None:
        a = await town.start("a", wire=wire)
        assert a.node.address is not None
        loop = asyncio.get_running_loop()
        begin = loop.time()
        silent = await asyncio.open_connection(a.node.address.host, a.node.address.port)
        begun = await asyncio.open_connection(a.node.address.host, a.node.address.port)
        begun[1].write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        for reader, writer in (silent, begun):
            assert await reader.read() == b""
            assert 0.45 < loop.time() - begin < 3.0
            writer.close()
        await until(lambda: not a.node._connections)
        assert a.node.num_refused == 2

    over_tcp(scene, hello_s=0.5)


def test_handshakes_count_as_connections_and_make_room_for_nodes(wire: SocketWire) -> None:
    async def scene(town: Town) -> None:
        a = await town.start("a", wire=wire)
        assert a.node.address is not None
        strangers = [
            await asyncio.open_connection(a.node.address.host, a.node.address.port)
            for _ in range(8)
        ]
        await until(lambda: a.node.num_refused == 4)
        assert len(a.node._connections) == 4
        for name in ("b", "c"):
            b = await town.start(name, wire=wire)
            b.node.ref("a").tell(AbortLoad(0, 1, ""))
        await a.inbox.has(2)
        assert len(a.node._connections) == 4
        for _, writer in strangers:
            writer.transport.abort()

    over_tcp(scene, connections=4, hello_s=20.0)


def test_strangers_that_were_refused_make_room_at_once(
    wire: SocketWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "_LINGER_S", 600.0)  # while the alert is on its way to them

    async def scene(town: Town) -> None:
        a = await town.start("a", wire=wire)
        assert a.node.address is not None
        strangers = []
        for _ in range(4):
            reader, writer = await asyncio.open_connection(a.node.address.host, a.node.address.port)
            writer.write(b"x" * 8)
            strangers.append((reader, writer))
        await until(lambda: a.node.num_refused == 4)
        assert len(a.node._connections) == 4
        b = await town.start("b", wire=wire)
        b.node.ref("a").tell(AbortLoad(0, 1, ""))
        await a.inbox.has(1)
        for _, writer in strangers:
            writer.transport.abort()

    over_tcp(scene, connections=4, hello_s=20.0)


def test_random_bytes_at_a_tls_door_change_nothing(wire: SocketWire) -> None:
    rng = random.Random(0)

    async def strange(address: Address) -> None:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        hello = bytearray(rng.randbytes(rng.randrange(1, 3000)))
        if rng.random() < 0.8:
            hello[:5] = b"\x16\x03\x01" + max(1, len(hello) - 5).to_bytes(2, "big")
        writer.write(hello)
        with contextlib.suppress(ConnectionError):
            writer.write_eof()
            await reader.read()
        writer.transport.abort()

    async def scene(town: Town) -> None:
        a, b = await town.start("a", wire=wire), await town.start("b", wire=wire)
        assert a.node.address is not None
        for _ in range(20):
            await asyncio.gather(*(strange(a.node.address) for _ in range(20)))
        a.inbox.answer = lambda message: VersionBurnt(message.version)
        assert await ask(b, "a", 7) == VersionBurnt(7)
        assert [link.peer for link in a.node.links()] == ["b"]
        assert a.node.num_refused > 200
        assert len(a.log.named("auth_failed")) == 1  # one machine, one line
        await until(lambda: len(a.node._connections) == 1)

    over_tcp(scene)


def test_bytes_changed_on_the_way_are_a_cut_and_not_a_message(wire: SocketWire) -> None:
    """Someone in between can end a connection. The session goes on over the next."""

    async def scene(town: Town) -> None:
        a, b = await town.start("a", wire=wire), await town.start("b", wire=wire)
        a.node.ref("b").tell(AbortLoad(0, 0, ""))
        await b.inbox.has(1)
        for i in range(1, 6):
            connection = a.node._peers["b"]._out.connection
            assert connection is not None
            assert connection._transport is not None
            a.node.ref("b").tell(AbortLoad(0, i, "x" * 100))
            forged = b"\x17\x03\x03\x00\x20" + bytes(32)
            connection._transport._socket.write(forged)  # type: ignore[attr-defined]
            a.node.ref("b").tell(AbortLoad(0, 100 + i, ""))
            await b.inbox.has(1 + 2 * i)
        assert [m.version for m in b.inbox.told] == [
            0,
            *(n for i in range(1, 6) for n in (i, 100 + i)),
        ]
        assert len(b.log.named("link_cut")) == 5
        assert not b.log.named("auth_failed")
        assert not a.letters.all

    over_tcp(scene)
