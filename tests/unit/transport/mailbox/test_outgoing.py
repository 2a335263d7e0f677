"""The writing half of a link, in virtual time, over a connection that keeps what it is given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, cast

from tests.helpers.nodes import feed
from tests.simulation.loop import run_virtual

from ratchet.transport.mailbox.codec import encode_note, unpack_link
from ratchet.transport.mailbox.connection import Connection
from ratchet.transport.mailbox.flight import Item
from ratchet.transport.mailbox.frames import BULK, CONTROL, Ack, Data, Failure
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.outgoing import Outgoing
from ratchet.transport.mailbox.reader import FrameReader
from ratchet.transport.mailbox.session import Session
from ratchet.transport.mailbox.shared import Loan

LIMITS = Limits(ack_delay_s=0.002, window_messages=8)


class Wire:
    """A connection, and what was written to it: the numbers of the envelopes of each frame."""

    def __init__(self) -> None:
        self.paused = False
        self.frames: list[list[int] | str] = []
        self._reader = FrameReader(1 << 20)
        self._reader.widen(1 << 20, 1 << 20)

    def write(self, data: bytes | bytearray) -> None:
        for found in feed(self._reader, data):
            frame = unpack_link(found)
            if isinstance(frame, Ack):
                self.frames.append("ack")
                continue
            assert isinstance(frame, Data)
            self.frames.append([cast("Failure", item).ask_id for item in frame.items])


class Scene:
    def __init__(self) -> None:
        self.session = Session("here", LIMITS)
        self.session.resume("there", (0, 0))
        self.wire = Wire()
        self.loans: list[Loan] = []
        self.out = Outgoing(self.session, LIMITS.ack_delay_s, self._copy)
        self.out.connection = cast("Connection", self.wire)

    def _copy(self, loan: Loan) -> Any:
        self.loans.append(loan)
        return asyncio.get_running_loop().create_future()

    def send(self, number: int, size: int = 0, lane: int = BULK) -> None:
        item = Item(encode_note(Failure(number, "k", "x" * size)), 1e9)
        if not self.out.write_now(lane, item, asyncio.get_running_loop().time()):
            assert self.session.push(lane, item)
            self.out.queued(item)

    def hear(self, count: int) -> None:
        """Receive so many envelopes."""
        first = self.session.delivered[CONTROL] + 1
        notes = [Failure(number, "k", "") for number in range(count)]
        self.session.receive(Data((0, 0), CONTROL, first, cast("Any", notes)), 10)
        self.out.acknowledge()


def play(scene: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await scene(Scene())

    run_virtual(main())


def test_what_comes_alone_is_written_at_once_and_what_follows_together() -> None:
    async def scene(at: Scene) -> None:
        at.send(0)
        assert at.wire.frames == [[0]]
        at.send(1)
        at.send(2)
        assert at.wire.frames == [[0]]
        await asyncio.sleep(0)
        assert at.wire.frames == [[0], [1, 2]]
        await asyncio.sleep(0.001)
        at.send(3)
        assert at.wire.frames[2:] == [[3]]

    play(scene)


def test_much_is_written_before_the_turn_ends() -> None:
    async def scene(at: Scene) -> None:
        for number in range(4):
            at.send(number, size=9 << 10)
        assert at.wire.frames == [[0], [1, 2, 3]]

    play(scene)


def test_a_full_socket_is_written_to_when_it_has_room() -> None:
    async def scene(at: Scene) -> None:
        at.wire.paused = True
        at.send(0)
        await asyncio.sleep(1.0)
        assert not at.wire.frames
        at.wire.paused = False
        at.out.pump()
        assert at.wire.frames == [[0]]

    play(scene)


def test_without_a_connection_it_waits_for_the_next() -> None:
    async def scene(at: Scene) -> None:
        at.out.connection = None
        at.send(0)
        at.hear(8)
        at.out.write_ack()
        await asyncio.sleep(1.0)
        assert not at.wire.frames
        assert not at.out.wrote
        at.out.connection = cast("Connection", at.wire)
        at.out.pump()
        assert at.wire.frames == [[0]]
        assert at.out.wrote

    play(scene)


def test_an_ack_waits_for_a_frame_that_carries_it() -> None:
    async def scene(at: Scene) -> None:
        at.hear(1)
        assert not at.wire.frames
        at.send(0)
        await asyncio.sleep(1.0)
        assert at.wire.frames == [[0]]
        at.hear(1)
        await asyncio.sleep(LIMITS.ack_delay_s)
        assert at.wire.frames == [[0], "ack"]
        at.hear(2)  # a quarter of the window
        assert at.wire.frames == [[0], "ack", "ack"]

    play(scene)


def test_after_the_end_it_acknowledges_nothing() -> None:
    async def scene(at: Scene) -> None:
        at.hear(1)
        at.out.close()
        await asyncio.sleep(1.0)
        assert not at.wire.frames

    play(scene)


def test_it_goes_on_when_a_copy_is_made_well_or_not() -> None:
    async def scene(at: Scene) -> None:
        for number, end in enumerate((Future.set_result, Future.set_exception, Future.cancel)):
            at.wire.paused = True
            at.send(number)
            await asyncio.sleep(0.001)
            copying = at.out.copy(Loan([b"x"]))
            at.wire.paused = False
            argument = {Future.set_result: [True], Future.set_exception: [OSError()]}.get(end, [])
            getattr(copying, end.__name__)(*argument)
            assert at.wire.frames == [[n] for n in range(number)]
            await asyncio.sleep(0)
            assert at.wire.frames == [[n] for n in range(number + 1)]
        assert len(at.loans) == 3

    play(scene)
