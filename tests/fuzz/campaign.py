"""One campaign against a node: frames from strangers, from half-way through the hello, and from
broken peers that hold the key, in both roles; and an honest peer that must be served throughout.

Consumes a seed and a number of frames, produces counts of what became of them and the list of what
went wrong. The node, its connections and its actor are the real ones; only the sockets are not:
bytes go straight into `get_buffer` and `buffer_updated`, cut at random places.
"""

from __future__ import annotations

import asyncio
import random
import resource
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
from tests.fuzz.outcome import EAR, Outcome, rss_mib
from tests.fuzz.victim import LIMITS, READ_BYTES, SECRET, VICTIM, Echo, Quiet, Sieve, Wire
from tests.helpers.actors import make_system
from tests.helpers.fuzz import MESSAGES, any_link_frame, example, hello_frame, link_frame, spoil
from tests.helpers.nodes import KEY, MemoryWire, Town, feed

from ratchet.errors import RatchetError
from ratchet.messages import AbortLoad, BurnVersion, VersionBurnt
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.codec import HEADER_BYTES, unpack_hello
from ratchet.transport.mailbox.connection import Connection
from ratchet.transport.mailbox.hello import NONCE_BYTES, Handshake, Identity, Refused
from ratchet.transport.mailbox.node import Node
from ratchet.transport.mailbox.reader import FrameReader
from ratchet.transport.mailbox.session import Session

NUM_PEERS = 24
CHECK_EVERY = 2000
ENOUGH = 50
"""problems; a campaign that finds so many ends."""


class Campaign:
    """The node under attack and everyone who talks to it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.outcome = Outcome()
        self.log = Quiet()
        self.honest_heard: list[int] = []
        self._system = make_system(log=self.log)
        actor = Echo.start(self._system, VICTIM, self.honest_heard)
        self.sieve = Sieve(actor, self.outcome.problems)
        self._wire = MemoryWire()
        self._town = Town(lambda name: Address("unix", f"/{name}"), LIMITS, self._wire)
        host = self._town.build(
            VICTIM,
            local=lambda name: self.sieve if name == VICTIM else None,
            log=self.log,
            dead_letters=self._system.dead_letters,
            locate=lambda name: Address("unix", f"/{name}"),
        )
        self.node: Node = host.node
        self._honest = self._town.build("friend", log=self.log)
        self._honest_told = 0
        self._lives = [f"life {i}" for i in range(NUM_PEERS)]
        for kind in MESSAGES * 20:  # annotations of structs are compiled when first looked at
            plain = msgspec.to_builtins(example(kind, self.rng), builtin_types=(bytes,))
            msgspec.convert(plain, kind)
        asyncio.get_running_loop().set_exception_handler(self._on_unhandled)

    def _on_unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        del loop
        self.outcome.problems.append(f"unhandled: {context}")

    # --- the run

    async def run(self, num_frames: int) -> Outcome:
        """Send at least so many frames."""
        await self.node.start()
        await self._honest.node.start()
        await self.be_honest()
        begin, checked, warm = time.perf_counter(), Counter[str](), 0.0
        kinds: tuple[Callable[[], Any], ...] = (
            self._stranger, self._half_way, self._broken_peer, self._impostor,
        )  # fmt: skip
        while self.outcome.frames < num_frames and len(self.outcome.problems) < ENOUGH:
            [kind] = self.rng.choices(kinds, (30, 20, 10, 8))
            EAR.listening = True
            await kind()
            EAR.listening = False
            self.outcome.connections += 1
            now = Counter(frames=self.outcome.frames, connections=self.outcome.connections)
            if max((now - checked).values(), default=0) >= CHECK_EVERY:
                checked = now
                await self.be_honest()
            if not warm and self.outcome.frames >= num_frames / 10:
                warm = rss_mib()
        await self.be_honest()
        self.outcome.seconds = time.perf_counter() - begin
        self.outcome.delivered = self.sieve.num_delivered
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.outcome.rss_mib = (warm, rss_mib(), peak)
        self.outcome.problems += [f"executed: {what}" for what in EAR.heard]
        EAR.heard.clear()
        return self.outcome

    async def be_honest(self) -> None:
        """The honest peer is still there, has its answers, and all it said was heard in order."""
        ref = self._honest.node.ref(VICTIM)
        for _ in range(5):
            ref.tell(AbortLoad(0, self._honest_told, SECRET))
            self._honest_told += 1
        reply = await ref.ask(BurnVersion(0, 7, SECRET), block=False, timeout=30.0)
        if reply != VersionBurnt(7):
            self.outcome.problems.append(f"the honest peer got {reply}")
        if self.honest_heard != list(range(self._honest_told)):
            self.outcome.problems.append("the honest peer was not heard in order, once")
        loop: Any = asyncio.get_running_loop()
        if any(timer.when() != timer.when() for timer in loop._scheduled):
            self.outcome.problems.append("a timer that is never due keeps others waiting")
        if self._honest.letters.all:
            self.outcome.problems.append(f"dead letters: {self._honest.letters.all[:3]}")

    async def stop(self) -> None:
        """End all of it; nothing may stay."""
        await self._honest.node.stop(1.0)
        await self.node.stop(1.0)
        self.sieve.actor.stop(block=False)
        await asyncio.sleep(0)
        if self.node._connections:
            self.outcome.problems.append("connections are left after the stop")

    # --- who attacks

    async def _stranger(self) -> None:
        """Has no key: sends anything, at once."""
        rng, link = self.rng, self._accept()
        self.sieve.expected = False
        for _ in range(rng.choice((1, 2, 4))):
            frame = hello_frame(rng) if rng.random() < 0.75 else any_link_frame(rng)
            if rng.random() < 0.7:
                frame = spoil(frame, rng)
            self._send("stranger", link, frame)
        await self._leave(link)
        self.sieve.expected = True

    async def _half_way(self) -> None:
        """Begins a right hello and spoils a later frame of it; some have another key."""
        rng, link = self.rng, self._accept()
        key = KEY if rng.random() < 0.7 else b"another key of the same size...."
        spoils_at = rng.randrange(1, 4)
        step = 0

        def change(frame: bytes) -> bytes:
            nonlocal step
            step += 1
            return spoil(frame, rng) if step >= spoils_at else frame

        self._shake("half way", link, self._handshake(key, VICTIM), change)
        await self._leave(link)

    async def _broken_peer(self) -> None:
        """Holds the key, opens the link, and then sends what it likes."""
        link = self._accept()
        if self._shake("broken peer", link, self._handshake(KEY, VICTIM), bytes):
            await self._talk(link)
        await self._leave(link)

    async def _impostor(self) -> None:
        """Answers where the node dials; with the key it goes on as a broken peer."""
        rng = self.rng
        key = KEY if rng.random() < 0.7 else b"another key of the same size...."
        handshake = self._handshake(key, None)
        link = Wire(self.node._connection(wanted=handshake._me.name))
        link.protocol.connection_made(link)
        change = bytes if rng.random() < 0.7 else lambda frame: spoil(frame, rng)
        if self._shake("impostor", link, handshake, change):
            await self._talk(link)
        await self._leave(link)

    # --- how

    def _accept(self) -> Wire:
        link = Wire(self._wire.accepts[self.node.address]())
        link.protocol.connection_made(link)
        return link

    def _handshake(self, key: bytes, wanted: str | None) -> Handshake:
        rng = self.rng
        number = rng.randrange(NUM_PEERS)
        if rng.random() < 0.3:
            self._lives[number] = f"life {rng.random()}"
        me = Identity(f"peer{number}", f"incarnation {rng.random()}", "run", key)
        session = Session(self._lives[number], LIMITS)
        return Handshake(me, rng.randbytes(NONCE_BYTES), lambda hello: session, wanted=wanted)

    def _shake(
        self, who: str, link: Wire, handshake: Handshake, change: Callable[[bytes], bytes]
    ) -> bool:
        """Say our half of a hello; tell whether the node thinks that the link is open."""
        reader = FrameReader(1 << 20)
        first = handshake.first()
        if first is not None:
            self._send(who, link, change(bytes(first)))
        while link.written and not handshake.done:
            written, link.written = bytes(link.written), bytearray()
            for frame in feed(reader, written):
                try:
                    answer = handshake.receive(unpack_hello(frame))
                except (Refused, RatchetError):
                    return False
                if answer is not None:
                    self._send(who, link, change(bytes(answer)))
        return isinstance(link.protocol, Connection) and link.protocol._link is not None

    async def _talk(self, link: Wire) -> None:
        """Send frames over an open link until it ends."""
        rng = self.rng
        name = link.protocol.handshake.peer.name
        ref = self.node.ref(name)
        if rng.random() < 0.3:
            reply = ref.ask(BurnVersion(0, 1, "?"), block=False, timeout=5.0)
            asyncio.ensure_future(reply).add_done_callback(asyncio.Future.exception)
            ref.watch(self.sieve.actor)
        held: list[bytes] = []
        for turn in range(rng.choice((5, 20, 60, 200))):
            if link.is_closing():
                return
            session = self.node._peers[name].session
            last = (session._lanes[0]._last_seq, session._lanes[1]._last_seq)
            frame = link_frame(rng, VICTIM, session.delivered, last)
            draw = rng.random()
            if draw < 0.12:
                frame = spoil(frame, rng)
            elif draw < 0.16:
                held.append(frame)
                continue
            elif draw < 0.2 and held:
                frame = held.pop(rng.randrange(len(held)))  # late: out of order, or again
            elif draw < 0.21:
                link.protocol.pause_writing()
            elif draw < 0.23:
                link.protocol.resume_writing()
            self._send("open link", link, frame)
            if turn % 16 == 15:
                await asyncio.sleep(0)

    async def _leave(self, link: Wire) -> None:
        """Close if the node has not, and let it know."""
        held = len(link.protocol._reader._buffer)
        room = READ_BYTES if link.protocol.handshake.done else LIMITS.hello_bytes
        if held > room + HEADER_BYTES:
            self.outcome.problems.append(f"a reader holds {held} bytes")
        link.close()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if link.protocol in self.node._connections:
            self.outcome.problems.append("a connection stays that is closed")

    def _send(self, who: str, link: Wire, frame: bytes) -> None:
        """Give the node a frame, in one piece or in several, and note what it did."""
        if link.is_closing():
            return
        self.outcome.sent[who] += 1
        before, broken = self.sieve.num_delivered, self.log.count["link_broken"]
        protocol, data = link.protocol, frame
        try:
            while data and not link.is_closing():
                room = protocol.get_buffer(-1)
                taken = min(len(room), len(data))
                if taken > 1 and self.rng.random() < 0.1:
                    taken = self.rng.randrange(1, taken)
                room[:taken] = data[:taken]
                protocol.buffer_updated(taken)
                data = data[taken:]
        except BaseException as error:  # noqa: BLE001 - what must not happen
            self.outcome.problems.append(f"{type(error).__name__}: {error}: {frame[:200]!r}")
            link.close()
        self.outcome.counts[self._verdict(link, before, broken)] += 1

    def _verdict(self, link: Wire, before: int, broken: int) -> str:
        reader = link.protocol._reader
        if self.log.count["link_broken"] > broken:
            return "protocol error on an open link"
        if link.is_closing():
            if link.protocol._link is not None:
                return "taken leave, or replaced"
            refused = b"\xa6reject" in link.written
            return "refused in the hello" if refused else "protocol error in the hello"
        if self.sieve.num_delivered > before:
            return "delivered"
        return "waits for the rest" if reader._end > reader._start else "taken"


def run(num_frames: int, seed: int) -> Outcome:
    """Run a campaign on an event loop of its own."""

    async def scene() -> Outcome:
        campaign = Campaign(seed)
        outcome = await campaign.run(num_frames)
        await campaign.stop()
        return outcome

    return asyncio.run(scene())
