"""Two ends of a link, each a session; what one sends is bytes in the hands of the test."""

from __future__ import annotations

import itertools
import os

from tests.helpers.groups import finished
from tests.helpers.nodes import feed

from ratchet.transport.mailbox.blobs import ARRAY_BYTES
from ratchet.transport.mailbox.codec import encode_note, encode_parcel, unpack_link
from ratchet.transport.mailbox.flight import Item
from ratchet.transport.mailbox.frames import Ack, Data, Envelope, Failure, Part, Shared, Tell
from ratchet.transport.mailbox.lane import Copy
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.peer_files import PeerFiles
from ratchet.transport.mailbox.reader import FrameReader
from ratchet.transport.mailbox.session import Session
from ratchet.transport.mailbox.shared import SHARED_BYTES

LIMITS = Limits(fragment_bytes=24, window_messages=4, window_bytes=400, message_bytes=200)
MUCH = 4 * SHARED_BYTES
RUNS = Limits(fragment_bytes=60_000, window_bytes=3 * MUCH)
SIZES = (MUCH - 100_000, 40, ARRAY_BYTES + 100_000)


def note(number: int, size: int = 0) -> bytes:
    return encode_note(Failure(number, "k", "x" * size))


class End:
    """One end of a link: a session, and a reader for each connection."""

    def __init__(self, name: str, limits: Limits = LIMITS) -> None:
        self.name = name
        self.session = Session(f"{name}1", limits)
        self.reader = FrameReader(1 << 16)
        self.got: list[int] = []
        self.numbers = itertools.count()

    def push(self, lane: int, size: int = 0, deadline: float = 1.0) -> int:
        number = next(self.numbers)
        assert self.session.push(lane, Item(note(number, size), deadline))
        return number

    def pull(self) -> bytes:
        out = bytearray()
        while (frame := self.session.pull()) is not None:
            out += frame
        if self.session.owes:
            out += self.session.ack()
        return bytes(out)

    def take(self, data: bytes) -> None:
        for frame in feed(self.reader, data):
            link_frame = unpack_link(frame)
            assert isinstance(link_frame, Data | Part | Ack)
            self.got += [number(e) for e in self.session.receive(link_frame, len(frame))]


def number(envelope: Envelope) -> int:
    assert isinstance(envelope, Failure)
    return envelope.ask_id


def connect(a: End, b: End) -> None:
    """What the hello does: a new connection, on which both go on where the other is."""
    a.reader, b.reader = FrameReader(1 << 16), FrameReader(1 << 16)
    delivered = {
        end.name: end.session.delivered_of(far.session.life) for end, far in ((a, b), (b, a))
    }
    for end, far in ((a, b), (b, a)):
        end.session.resume(far.session.life, delivered[far.name])


def talk(a: End, b: End) -> int:
    """Exchange until both are silent; return how many bytes a has sent."""
    total = 0
    while True:
        from_a, from_b = a.pull(), b.pull()
        total += len(from_a)
        if not from_a and not from_b:
            return total
        b.take(from_a)
        a.take(from_b)


def pair(limits: Limits = LIMITS) -> tuple[End, End]:
    a, b = End("a", limits), End("b", limits)
    connect(a, b)
    return a, b


def large(number: int, *sizes: int) -> Item:
    message = finished(*(size // 4 for size in sizes))
    body, arrays = encode_parcel(Tell(str(number), "b", None, None, message))
    return Item(body, 1.0, arrays)


def sharing(a: End, b: End, *, shares: bool = True, copy: Copy | None = None) -> None:
    """A new connection of two processes of one host, or of two hosts."""
    for end in (a, b):
        files = PeerFiles(os.getpid()) if shares else None
        end.session.share(lends=shares, files=files, copy=copy)
    connect(a, b)


def take_all(b: End, data: bytes) -> list[Envelope]:
    got: list[Envelope] = []
    for frame in feed(b.reader, data):
        link_frame = unpack_link(frame)
        assert isinstance(link_frame, Data | Part | Shared | Ack)
        got += b.session.receive(link_frame, len(frame))
    return got


def frames_of(a: End) -> list[bytes | bytearray]:
    return list(iter(a.session.pull, None))
