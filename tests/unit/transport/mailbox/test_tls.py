"""TLS on real sockets: what travels over its links, and that nobody on the way can read it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import pytest
from tests.helpers.tcp_towns import ask, over_tcp, until

from ratchet.errors import AuthFailed
from ratchet.messages import AbortLoad, PromptsClaimed, VersionBurnt
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.wire import SocketWire
from ratchet.types import Assignment, Prompt

if TYPE_CHECKING:
    from tests.helpers.nodes import Host, Town


def test_messages_of_every_size_travel_both_ways(wire: SocketWire) -> None:
    def bulk(number: int) -> PromptsClaimed:
        text = "x" * (3_000_000 if number % 10 == 0 else number)
        return PromptsClaimed("i", (Assignment(number, 0, 0, Prompt("p", text), 1, 1.0),))

    async def scene(town: Town) -> None:
        a, b = await town.start("a", wire=wire), await town.start("b", wire=wire)
        for i in range(50):
            a.node.ref("b").tell(bulk(i))
            b.node.ref("a").tell(bulk(i))
        for host in (a, b):
            assert await host.inbox.has(50) == [bulk(i) for i in range(50)]
            assert not host.letters.all

    over_tcp(scene)


def test_nothing_that_is_sent_can_be_read_on_the_way(wire: SocketWire) -> None:
    secret = "the words of a prompt " * 100

    async def scene(town: Town) -> None:
        a, b = await town.start("a", wire=wire), await town.start("b", wire=wire)
        seen = bytearray()
        async with between(b, lambda data: seen.extend(data) or data) as address:
            a.node._locate = lambda name: address
            a.node.ref("b").tell(AbortLoad(0, 1, secret))
            assert await b.inbox.has(1) == [AbortLoad(0, 1, secret)]
            await a.node.stop(1.0)
        assert len(seen) > len(secret)
        assert b"words of a prompt" not in seen
        assert b"a/1" not in seen  # not even who is there

    over_tcp(scene)


def test_a_hello_that_was_changed_on_the_way_is_refused(wire: SocketWire) -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a", wire=wire), await town.start("b", wire=wire)
        chunks = itertools.count()

        def spoil(data: bytes) -> bytes:
            """Leave the handshake alone: to b, to a, to b with the hello of a."""
            return data if next(chunks) < 3 else data[:-1] + bytes([data[-1] ^ 1])

        async with between(b, spoil) as address:
            a.node._locate = lambda name: address
            with pytest.raises(AuthFailed, match="the TLS handshake failed: decryption failed or"):
                await ask(a, "b")
            await a.node.stop(1.0)
        assert not b.inbox.told

    over_tcp(scene)


@contextlib.asynccontextmanager
async def between(host: Host, change: Callable[[bytes], bytes]) -> AsyncIterator[Address]:
    """Yield an address where somebody sits who passes everything on, both ways, as it likes."""
    over = asyncio.Event()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(change(data))
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = host.node.address
        assert address is not None
        far_reader, far_writer = await asyncio.open_connection(address.host, address.port)
        try:
            await asyncio.gather(pass_on(reader, far_writer), pass_on(far_reader, writer))
        finally:  # the test may end first, and cancels this
            for end in (writer, far_writer):
                end.transport.abort()
        over.set()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield Address("tcp", "127.0.0.1", server.sockets[0].getsockname()[1])
        await over.wait()


def test_a_stop_delivers_what_was_told(wire: SocketWire) -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a", wire=wire), await town.start("b", wire=wire)
        b.node.ref("a").watch(b.inbox)
        for i in range(2000):
            a.node.ref("b").tell(AbortLoad(0, i, "x" * 1000))
        await a.node.stop(20.0)
        told = await b.inbox.has(2001)
        assert [message.version for message in told[:2000]] == list(range(2000))
        assert told[2000].reason == "a has stopped: a stops"

    over_tcp(scene)


def test_a_death_is_told_at_once(wire: SocketWire) -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a", wire=wire), await town.start("b", wire=wire)
        b.inbox.answer = lambda message: VersionBurnt(message.version)
        a.node.ref("b").watch(a.inbox)
        await ask(a, "b")
        loop = asyncio.get_running_loop()
        begin = loop.time()
        b.kill()
        [down] = await a.inbox.has(1)
        assert down.reason == "the process of b has ended"
        assert loop.time() - begin < 1.0

    over_tcp(scene)


def test_a_socket_that_is_full_pauses_the_sender(wire: SocketWire) -> None:
    """What waits in the process in front of a control message stays small under TLS too."""

    async def scene(town: Town) -> None:
        a, b = await town.start("a", wire=wire), await town.start("b", wire=wire)
        b.inbox.answer = lambda message: VersionBurnt(message.version)
        await ask(a, "b")
        mine, theirs = (x.node._peers[y]._out.connection for x, y in ((a, "b"), (b, "a")))
        assert mine is not None
        assert theirs is not None
        assert mine._transport is not None
        theirs._transport._socket.pause_reading()  # type: ignore[union-attr]
        prompt = Prompt("p", "x" * 12_000_000)
        a.node.ref("b").tell(PromptsClaimed("i", (Assignment(0, 0, 0, prompt, 1, 1.0),)))
        await until(lambda: mine.paused)
        await asyncio.sleep(0.05)
        assert mine.paused
        assert mine._transport.get_write_buffer_size() < 2 << 20
        theirs._transport._socket.resume_reading()  # type: ignore[union-attr]
        await b.inbox.has(2)
        assert not mine.paused

    over_tcp(scene)
