"""One lane of a session: a numbered stream out and a numbered stream in. Pure.

Consumes envelopes to send, acks and frames; produces frames to write and envelopes to deliver. What
does not fit into the window stays queued until acks make room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from ratchet.errors import ProtocolError
from ratchet.transport.mailbox.codec import Data, Envelope, Part, RawData, decode_envelope
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


class Lane:
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

    @property
    def has_more(self) -> bool:
        """Something waits to be written."""
        return bool(self.queue or self._resend)

    def pull(self, acks: tuple[int, int]) -> RawData | Part | None:
        """Return the next frame, or None if there is nothing to send or no room in the window."""
        if self._resend:
            return self._pull_again(acks)
        if not self.queue:
            return None
        if self.queue[0].numbered or len(self.queue[0].body) > self._limits.fragment_bytes:
            return self._pull_part(acks)
        return self._pull_whole(acks)

    def _pull_whole(self, acks: tuple[int, int]) -> RawData | None:
        """Number envelopes that fit into one frame together, or one that fills it."""
        queue, first = self.queue, self._last_seq + 1
        items: list[msgspec.Raw] = []
        size = 0
        while queue:
            item = queue[0]
            taken = len(item.body)
            if (items and size + taken > _BATCH_BYTES) or self._is_full(taken):
                break
            queue.popleft()
            self._number(item, 0, taken)
            items.append(msgspec.Raw(item.body))
            size += taken
        return RawData(acks, self.index, first, items) if items else None

    def _pull_part(self, acks: tuple[int, int]) -> Part | None:
        """Number the next fragment of a long envelope."""
        item = self.queue[0]
        end = min(item.numbered + self._limits.fragment_bytes, len(item.body))
        if self._is_full(end - item.numbered):
            return None
        if end == len(item.body):
            self.queue.popleft()
        return self._as_part(acks, self._number(item, item.numbered, end))

    def _pull_again(self, acks: tuple[int, int]) -> RawData | Part:
        """Repeat pieces that were numbered before the connection was lost."""
        first = self._resend.popleft()
        if not first.whole:
            return self._as_part(acks, first)
        items, size = [msgspec.Raw(first.item.body)], first.end
        while self._resend and self._resend[0].whole and size + self._resend[0].end <= _BATCH_BYTES:
            piece = self._resend.popleft()
            items.append(msgspec.Raw(piece.item.body))
            size += piece.end
        return RawData(acks, self.index, first.seq, items)

    def _is_full(self, size: int) -> bool:
        """Tell whether the window has no room; an empty one takes anything."""
        return bool(self.flight) and (
            len(self.flight) >= self._limits.window_messages
            or self.flight_bytes + size > self._limits.window_bytes
        )

    def _number(self, item: Item, start: int, end: int) -> _Piece:
        self._last_seq += 1
        piece = _Piece(self._last_seq, item, start, end)
        self.flight.append(piece)
        self.flight_bytes += end - start
        self.queue_bytes -= end - start
        item.numbered = end
        return piece

    def _as_part(self, acks: tuple[int, int], piece: _Piece) -> Part:
        body = piece.item.body
        more = piece.end < len(body)
        return Part(acks, self.index, piece.seq, more, body[piece.start : piece.end])

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
        """Return the envelopes that are new."""
        known = self._fresh(frame.seq, len(frame.items))
        items = frame.items[known:] if known else frame.items
        if items and self._partial:
            raise ProtocolError("an envelope was cut short by another one")
        self.delivered += len(items)
        return items

    def on_part(self, frame: Part) -> list[Envelope]:
        """Return the envelope that the fragment completes, if it does."""
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
