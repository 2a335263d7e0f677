"""One end of the session between two nodes: ordered, resumed, deduplicated, bounded. Pure.

Consumes envelopes to send and frames received, produces frames to write and envelopes to deliver.
Waits for nothing and knows no clock: whoever drives it passes the time in and calls `pull` when
there is room, so that the same code runs on sockets and in a simulation. What is queued beyond the
window is unblocked by the peer's acks.

Each lane is a stream of pieces numbered from 1. A piece is a whole envelope, or a fragment of a
long one. The receiver takes each number once: what it has seen it drops, what it cannot follow on
ends the link. A session outlives its connections. It is named by the pair of its ends' lives: an
end takes a new `life` whenever it gives the session up, and an end that meets another life than it
knew gives up what it had sent to the old one. So nothing is delivered twice to the same life, and
nothing that was sent to one life reaches the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from ratchet.errors import ProtocolError
from ratchet.transport.mailbox.codec import (
    BULK,
    CONTROL,
    Ack,
    Data,
    Envelope,
    Part,
    RawData,
    decode_envelope,
    pack,
)
from ratchet.transport.mailbox.limits import Limits

_BATCH_BYTES: Final = 64 << 10
"""Small envelopes share a frame up to this size."""


@dataclass(slots=True)
class Item:
    """An envelope on its way."""

    body: bytes
    deadline: float
    numbered: int = 0
    """bytes of it that are in numbered pieces"""


class _Piece(NamedTuple):
    seq: int
    item: Item
    start: int
    end: int

    @property
    def whole(self) -> bool:
        return self.end - self.start == len(self.item.body)


class _Lane:
    """One direction out and one direction in of a lane."""

    def __init__(self, index: int, limits: Limits) -> None:
        self.index = index
        self._limits = limits
        self.queue: deque[Item] = deque()
        self.queue_bytes = 0
        self.flight: deque[_Piece] = deque()
        self.flight_bytes = 0
        self._resend: deque[_Piece] = deque()
        self._last_seq = 0
        self.delivered = 0
        self._partial = bytearray()

    # --- out

    def push(self, item: Item) -> bool:
        """Queue an envelope; False if the queue is full."""
        if (
            len(self.queue) >= self._limits.queue_messages
            or self.queue_bytes + len(item.body) > self._limits.queue_bytes
        ):
            return False
        self.queue.append(item)
        self.queue_bytes += len(item.body)
        return True

    def pull(self, acks: tuple[int, int]) -> RawData | Part | None:
        """Return the next frame, or None if there is nothing to send or no room in the window."""
        pieces: list[_Piece] = []
        size = 0
        while (piece := self._next(size)) is not None:
            pieces.append(piece)
            size += piece.end - piece.start
            if not piece.whole:
                break
        if not pieces:
            return None
        first = pieces[0]
        if first.whole:
            items = [msgspec.Raw(piece.item.body) for piece in pieces]
            return RawData(acks, self.index, first.seq, items)
        body = first.item.body
        return Part(
            acks, self.index, first.seq, first.end < len(body), body[first.start : first.end]
        )

    def _next(self, taken: int) -> _Piece | None:
        """Take the next piece, if it may share a frame with `taken` bytes before it."""
        if self._resend:
            head = self._resend[0]
            if taken and (not head.whole or taken + len(head.item.body) > _BATCH_BYTES):
                return None
            return self._resend.popleft()
        if not self.queue:
            return None
        item = self.queue[0]
        start = item.numbered
        end = min(start + self._limits.fragment_bytes, len(item.body))
        size = end - start
        if taken and (size < len(item.body) or taken + size > _BATCH_BYTES):
            return None
        if self.flight and (
            len(self.flight) >= self._limits.window_messages
            or self.flight_bytes + size > self._limits.window_bytes
        ):
            return None
        self._last_seq += 1
        piece = _Piece(self._last_seq, item, start, end)
        self.flight.append(piece)
        self.flight_bytes += size
        self.queue_bytes -= size
        item.numbered = end
        if end == len(item.body):
            self.queue.popleft()
        return piece

    def on_ack(self, seq: int) -> None:
        """The peer has every piece up to `seq`."""
        if seq > self._last_seq:
            msg = f"the peer acknowledges piece {seq}; the last one sent is {self._last_seq}"
            raise ProtocolError(msg)
        flight = self.flight
        while flight and flight[0].seq <= seq:
            piece = flight.popleft()
            self.flight_bytes -= piece.end - piece.start
        while self._resend and self._resend[0].seq <= seq:
            self._resend.popleft()

    def rewind(self) -> None:
        """Send again, on a new connection, everything that is not acknowledged."""
        self._resend = deque(self.flight)

    def expire(self, now: float) -> Iterator[Item]:
        """Take what is past its deadline out of the queue; what is begun must be finished."""
        begun = self.queue.popleft() if self.queue and self.queue[0].numbered else None
        while self.queue and self.queue[0].deadline <= now:
            item = self.queue.popleft()
            self.queue_bytes -= len(item.body)
            yield item
        if begun is not None:
            self.queue.appendleft(begun)

    def outstanding(self) -> Iterator[Item]:
        """Yield, in order, each envelope that the peer has not acknowledged to its end."""
        last: Item | None = None
        for piece in self.flight:
            if piece.item is not last:
                last = piece.item
                yield last
        for item in self.queue:
            if item is not last:
                yield item

    # --- in

    def _fresh(self, seq: int, count: int) -> int:
        """Return how many of the pieces `seq` ... are duplicates."""
        known = self.delivered + 1 - seq
        if seq < 1 or known < 0:
            msg = f"piece {seq} follows on piece {self.delivered}: pieces are missing between them"
            raise ProtocolError(msg)
        return min(known, count)

    def on_data(self, frame: Data) -> list[Envelope]:
        known = self._fresh(frame.seq, len(frame.items))
        items = frame.items[known:] if known else frame.items
        if items and self._partial:
            raise ProtocolError("an envelope was cut short by another one")
        self.delivered += len(items)
        return items

    def on_part(self, frame: Part) -> list[Envelope]:
        if self._fresh(frame.seq, 1):
            return []
        if len(self._partial) + len(frame.data) > self._limits.message_bytes:
            raise ProtocolError(f"a message exceeds {self._limits.message_bytes} bytes")
        self.delivered += 1
        self._partial += frame.data
        if frame.more:
            return []
        whole, self._partial = self._partial, bytearray()
        return [decode_envelope(whole)]


class Session:
    """Both lanes of one end. `life` and `peer_life` name the session."""

    def __init__(self, life: str, limits: Limits) -> None:
        self._limits = limits
        self.num_duplicates = 0
        self._begin(life)

    def _begin(self, life: str) -> None:
        self.life = life
        self.peer_life: str | None = None
        """None before the first connection of this life"""
        self._owed = 0
        """pieces received since the last acks went out"""
        self._owed_bytes = 0
        self._lanes = (_Lane(CONTROL, self._limits), _Lane(BULK, self._limits))

    # --- what the driver does

    def push(self, lane: int, item: Item) -> bool:
        """Queue an envelope for the peer; False if the queue is full."""
        return self._lanes[lane].push(item)

    def pull(self) -> bytearray | None:
        """Return the next frame to write: control before bulk, each with acks; None if there is
        nothing, or no room in the window.
        """
        acks = self.delivered
        for lane in self._lanes:
            frame = lane.pull(acks)
            if frame is not None:
                self._paid()
                return pack(frame)
        return None

    def ack(self) -> bytearray:
        """Return a frame with the acks alone."""
        self._paid()
        return pack(Ack(self.delivered))

    def _paid(self) -> None:
        self._owed = self._owed_bytes = 0

    def receive(self, frame: Data | Part | Ack, num_bytes: int) -> list[Envelope]:
        """Take a frame of `num_bytes`; return the envelopes that it completes, in order.

        Raises:
            ProtocolError: a gap, an ack of what was never sent, a lane that does not exist; the
                session cannot go on.
        """
        for lane, seq in zip(self._lanes, frame.acks, strict=True):
            lane.on_ack(seq)
        if isinstance(frame, Ack):
            return []
        if not 0 <= frame.lane < len(self._lanes):
            raise ProtocolError(f"there is no lane {frame.lane}")
        lane = self._lanes[frame.lane]
        before = lane.delivered
        fresh, pieces = (
            (lane.on_part(frame), 1)
            if isinstance(frame, Part)
            else (lane.on_data(frame), len(frame.items))
        )
        self.num_duplicates += before + pieces - lane.delivered
        self._owed += pieces
        self._owed_bytes += num_bytes
        return fresh

    # --- what it owes and holds

    @property
    def delivered(self) -> tuple[int, int]:
        """Pieces received in order, per lane."""
        control, bulk = self._lanes
        return control.delivered, bulk.delivered

    @property
    def owes(self) -> bool:
        """Something was received that is not acknowledged."""
        return self._owed > 0

    @property
    def owes_much(self) -> bool:
        """A quarter of the peer's window waits for our acks."""
        return (
            self._owed * 4 >= self._limits.window_messages
            or self._owed_bytes * 4 >= self._limits.window_bytes
        )

    @property
    def num_queued(self) -> int:
        """Envelopes that are not on their way yet."""
        return sum(len(lane.queue) for lane in self._lanes)

    @property
    def num_in_flight(self) -> int:
        """Pieces that are not acknowledged."""
        return sum(len(lane.flight) for lane in self._lanes)

    @property
    def idle(self) -> bool:
        """Nothing is queued and nothing unacknowledged."""
        return not any(lane.queue or lane.flight for lane in self._lanes)

    # --- from one connection to the next, and from one life to the next

    def delivered_of(self, peer_life: str) -> tuple[int, int]:
        """Return what to tell a peer with this life about what has arrived from it."""
        return self.delivered if self.peer_life == peer_life else (0, 0)

    def knows_other(self, peer_life: str) -> bool:
        """Tell whether this session was with another life of the peer."""
        return self.peer_life is not None and self.peer_life != peer_life

    def resume(self, peer_life: str, delivered: tuple[int, int]) -> None:
        """Go on over a new connection; `delivered` is what the peer has of this life.

        Raises:
            ProtocolError: the peer has what was never sent.
            ValueError: the session is with another life; `end` it first.
        """
        if self.knows_other(peer_life):
            raise ValueError("a session does not change its peer")
        self.peer_life = peer_life
        for lane, seq in zip(self._lanes, delivered, strict=True):
            lane.on_ack(seq)
            lane.rewind()

    def end(self, life: str) -> list[Item]:
        """Give the session up and return what was not delivered. `life` is a new one, or still the
        same one if it is the peer that began anew: such a peer knows nothing of it.
        """
        lost = [item for lane in self._lanes for item in lane.outstanding()]
        self._begin(life)
        return lost

    def expire(self, now: float) -> list[Item]:
        """Take out, and return, what waited past its deadline and was not begun."""
        return [item for lane in self._lanes for item in lane.expire(now)]
