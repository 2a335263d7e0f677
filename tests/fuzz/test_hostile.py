"""Peers that dawdle, flood or announce too much, over TCP, while an honest peer goes on.

Elsewhere: a stranger that announces too much (`test_wire.py`) or says nothing, too many connections
of nodes (`test_node_refusals.py`); handshakes of TLS that do not end (`test_tls_strangers.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from tests.fuzz.sockets import open_link
from tests.fuzz.victim import READ_BYTES
from tests.helpers.nodes import Host, Town

from ratchet.messages import BurnVersion, VersionBurnt
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.codec import pack
from ratchet.transport.mailbox.frames import PROTOCOL, Ack, Hello
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.node import Node

LIMITS = Limits(hello_s=0.6, heartbeat_s=0.1, suspect_s=0.4, dead_s=1.0, connections=32)
SLACK_S = 1.5
"""A busy machine is late; what is not cut off at all is later."""
HELLO = bytes(pack(Hello(PROTOCOL, "slow", "victim", "i", "run", b"n" * 32)))
End = Callable[[], Awaitable[float]]


@asynccontextmanager
async def under_attack(limits: Limits = LIMITS) -> AsyncIterator[tuple[Town, Host]]:
    """A victim with an honest peer, that asks all the time and always has its answer."""
    town = Town(lambda name: Address("tcp", "127.0.0.1", 0), limits)
    victim, friend = await town.start("victim"), await town.start("friend")
    victim.inbox.answer = lambda message: VersionBurnt(message.version)
    answers = [0]

    async def be_honest() -> None:
        while True:
            question = BurnVersion(0, answers[0], "")
            reply = await friend.node.ref("victim").ask(question, block=False, timeout=5.0)
            assert reply == VersionBurnt(answers[0])
            answers[0] += 1
            await asyncio.sleep(0.01)

    honest = asyncio.create_task(be_honest())
    try:
        async with asyncio.timeout(30):
            yield town, victim
            before = answers[0]
            async with asyncio.timeout(6):
                while answers[0] == before and not honest.done():  # noqa: ASYNC110 - at most 6 s
                    await asyncio.sleep(0.01)
            assert not honest.done(), honest
            assert set(victim.node._connections) == {
                victim.node._peers["friend"]._out.connection,
                *(peer._out.connection for peer in victim.node._peers.values() if peer.connected),
            }
    finally:
        honest.cancel()
        await town.stop()


async def dial(node: Node) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(node.address.host, node.address.port)


async def cut_off_after(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, drip: bytes, pause_s: float
) -> float:
    """Send bytes one at a time; return after how many seconds the node had enough."""

    async def write() -> None:
        for byte in drip:
            writer.write(bytes((byte,)))
            await asyncio.sleep(pause_s)
        await asyncio.Event().wait()

    loop = asyncio.get_running_loop()
    begin = loop.time()
    writing = asyncio.create_task(write())
    try:
        with contextlib.suppress(ConnectionError):
            while await reader.read(4096):
                pass
    finally:
        writing.cancel()
        writer.transport.abort()
    return loop.time() - begin


@pytest.mark.parametrize(
    ("drip", "pause_s"),
    [(HELLO * 10, 0.02), (HELLO, 0.0), (b"\x00\x00\x0f\xff" + bytes(4000), 0.002), (b"", 0.0)],
    ids=["byte by byte", "a hello and no more", "a frame that fills slowly", "nothing"],
)
def test_a_hello_that_does_not_end_is_cut_off(drip: bytes, pause_s: float) -> None:
    async def scene() -> None:
        async with under_attack() as (_, victim):
            links = [await dial(victim.node) for _ in range(5)]
            after_s = await asyncio.gather(*(cut_off_after(*link, drip, pause_s) for link in links))
            assert min(after_s) > LIMITS.hello_s - 0.1
            assert max(after_s) < LIMITS.hello_s + SLACK_S

    asyncio.run(scene())


def test_hello_upon_hello_is_cut_off_at_once() -> None:
    async def scene() -> None:
        async with under_attack() as (_, victim):
            reader, writer = await dial(victim.node)
            writer.write(HELLO * 2)
            assert await cut_off_after(reader, writer, b"", 0.0) < LIMITS.hello_s - 0.1

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("drip", "pause_s"),
    [(bytes(pack(Ack((0, 0))))[:5], 0.0), ((1 << 20).to_bytes(4, "big") + b"\x94" * 300, 0.01)],
    ids=["half a frame and silence", "a frame that never ends"],
)
def test_a_peer_that_stops_in_the_middle_of_a_frame_is_dead_in_time(
    drip: bytes, pause_s: float
) -> None:
    async def scene() -> None:
        async with under_attack() as (_, victim):
            link = await open_link(victim.node, "slow", random.Random(0))
            after_s = await cut_off_after(*link, drip, pause_s)
            assert LIMITS.dead_s - 0.25 < after_s < LIMITS.dead_s + SLACK_S

    asyncio.run(scene())


def test_a_peer_that_announces_too_much_is_cut_off_at_once() -> None:
    async def scene() -> None:
        async with under_attack() as (_, victim):
            reader, writer = await open_link(victim.node, "large", random.Random(0))
            [connection] = [
                each for each in victim.node._connections if each.handshake.claimed == "large"
            ]
            writer.write((LIMITS.frame_bytes + 1).to_bytes(4, "big") + bytes(100_000))
            assert await cut_off_after(reader, writer, b"", 0.0) < LIMITS.dead_s - 0.25
            assert len(connection._reader._buffer) <= READ_BYTES
            assert len(victim.log.named("link_broken")) == 1

    asyncio.run(scene())


def test_a_flood_of_strangers_keeps_no_node_out() -> None:
    """Three times as many strangers as connections, each of which dials again when it is cut."""

    async def scene() -> None:
        # a node whose half-open link was displaced tries again; that is no death within a second
        async with under_attack(replace(LIMITS, dead_s=15.0)) as (town, victim):

            async def flood() -> None:
                while True:
                    with contextlib.suppress(OSError):
                        await cut_off_after(*await dial(victim.node), b"\x00", 0.0)
                    await asyncio.sleep(0.2)

            most = 0
            strangers = [asyncio.create_task(flood()) for _ in range(3 * LIMITS.connections)]
            for number in range(5):
                await asyncio.sleep(0.1)
                newcomer = await town.start(f"newcomer{number}")
                question = BurnVersion(0, number, "")
                reply = newcomer.node.ref("victim").ask(question, block=False, timeout=20.0)
                assert await reply == VersionBurnt(number)
                most = max(most, len(victim.node._connections))
            for each in strangers:
                each.cancel()
            await asyncio.gather(*strangers, return_exceptions=True)
            assert victim.node.num_refused > 3 * LIMITS.connections
            assert most <= LIMITS.connections + 5  # those that are just being closed
            await asyncio.sleep(LIMITS.hello_s)  # by then the last of them is shown out

    asyncio.run(scene())
