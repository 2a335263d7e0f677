"""Frames over real sockets: the same mixture as in a campaign, to a node that listens on TCP.

Consumes a seed and a number of frames, produces an `Outcome`. Waits for the node to close, or to
have read; its hello time-out unblocks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import Any

from tests.fuzz.outcome import Outcome
from tests.fuzz.victim import LIMITS, SECRET, VICTIM, Quiet
from tests.helpers.fuzz import any_link_frame, hello_frame, link_frame, spoil
from tests.helpers.nodes import KEY, Town, feed

from ratchet.messages import BurnVersion, VersionBurnt
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.codec import unpack_hello
from ratchet.transport.mailbox.hello import NONCE_BYTES, Handshake, Identity
from ratchet.transport.mailbox.node import Node
from ratchet.transport.mailbox.reader import FrameReader
from ratchet.transport.mailbox.session import Session

_AT_ONCE = 8


async def _stranger(node: Node, rng: random.Random) -> int:
    frames = [hello_frame(rng) if rng.random() < 0.7 else any_link_frame(rng) for _ in range(4)]
    data = b"".join(spoil(each, rng) if rng.random() < 0.7 else each for each in frames)
    reader, writer = await asyncio.open_connection(node.address.host, node.address.port)
    writer.write(data)
    if rng.random() < 0.5:
        with contextlib.suppress(ConnectionError):
            writer.write_eof()
            await reader.read()
    writer.transport.abort()
    return len(frames)


async def open_link(
    node: Node, name: str, rng: random.Random
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Dial with the key, as a node of that name, and go through the hello.

    Raises:
        ConnectionError: the node closed before that.
    """
    reader, writer = await asyncio.open_connection(node.address.host, node.address.port)
    me = Identity(name, f"incarnation {rng.random()}", "run", KEY)
    session = Session(f"life {rng.random()}", LIMITS)
    handshake = Handshake(me, rng.randbytes(NONCE_BYTES), lambda hello: session, wanted=node.name)
    first = handshake.first()
    assert first is not None
    writer.write(first)
    frames = FrameReader(1 << 20)
    while not handshake.done:
        data = await reader.read(65536)
        if not data:
            writer.transport.abort()
            raise ConnectionResetError("closed during the hello")
        for frame in feed(frames, data):
            answer = handshake.receive(unpack_hello(frame))
            if answer is not None:
                writer.write(answer)
    return reader, writer


async def _broken_peer(node: Node, rng: random.Random, number: int) -> int:
    """Open a link with the key, send a burst of frames with spoilt ones in it, wait for the end."""
    name, count, seqs = f"peer{number}", rng.randrange(5, 60), (0, 0)
    try:
        reader, writer = await open_link(node, name, rng)
    except ConnectionError:
        return 1
    with contextlib.suppress(ConnectionError):
        for _ in range(count):
            frame = link_frame(rng, VICTIM, seqs, (0, 0))
            writer.write(spoil(frame, rng) if rng.random() < 0.05 else frame)
            if rng.random() < 0.1:
                seqs = node._peers[name].session.delivered
        if rng.random() < 0.5:
            writer.write_eof()
            await reader.read()
    writer.transport.abort()
    return count + 3


async def attack(num_frames: int, seed: int) -> Outcome:
    """Send at least so many frames, from several connections at once."""
    rng, outcome, log = random.Random(seed), Outcome(), Quiet()
    loop = asyncio.get_running_loop()

    def on_unhandled(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        outcome.problems.append(f"unhandled: {context}")

    loop.set_exception_handler(on_unhandled)
    town = Town(lambda name: Address("tcp", "127.0.0.1", 0), LIMITS)
    victim = await town.start(VICTIM, log=log, locate=_nowhere)
    victim.inbox.answer = lambda message: VersionBurnt(0)
    honest = await town.start("friend", log=log)
    question = BurnVersion(0, 7, SECRET)
    begin = time.perf_counter()
    while outcome.frames < num_frames:
        attacks = [_stranger(victim.node, rng) for _ in range(_AT_ONCE // 2)]
        attacks += [_broken_peer(victim.node, rng, i) for i in range(_AT_ONCE // 2)]
        outcome.sent["sockets"] += sum(await asyncio.gather(*attacks))
        outcome.connections += len(attacks)
        outcome.delivered += len(victim.inbox.told)
        for each in (victim.inbox.told, victim.inbox.traces, victim.inbox.watchers):
            each.clear()
        victim.letters.all.clear()
        await honest.node.ref(VICTIM).ask(question, block=False, timeout=30.0)
    async with asyncio.timeout(10):
        while len(victim.node._connections) > 1:  # the attackers' ends are closed already
            await honest.node.ref(VICTIM).ask(question, block=False, timeout=30.0)
    outcome.seconds = time.perf_counter() - begin
    outcome.counts = log.count
    await town.stop()
    if victim.node._connections:
        outcome.problems.append("connections are left after the stop")
    return outcome


def _nowhere(name: str) -> Address:
    raise LookupError(name)


def run(num_frames: int, seed: int) -> Outcome:
    """Run the attack on an event loop of its own."""
    return asyncio.run(attack(num_frames, seed))
