"""One lane of a session: a numbered stream out and a numbered stream in. Pure.

Consumes envelopes to send, acks and frames; produces frames to write and envelopes to deliver. What
does not fit into the window stays queued until acks make room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, TypeAlias

import msgspec

from ratchet.errors import ProtocolError
from ratchet.transport.mailbox.assembly import Assembly
from ratchet.transport.mailbox.codec import Body, Data, Envelope, Part, pack, pack_data
from ratchet.transport.mailbox.limits import Limits

_BATCH_BYTES: Final = 64 << 10
"""Small envelopes share a frame up to this size."""


class Item(msgspec.Struct, eq=False):
    """An envelope on its way, with the arrays that travel beside it."""

    body: bytes
    deadline: float
    arrays: tuple[bytes, ...] = ()
    section: int = 0
    """what its next piece is of: 0 the envelope, n the n-th array"""
    offset: int = 0
    """where in that the next piece begins"""

    @property
    def num_bytes(self) -> int:
        """Size of all that travels."""
        size = len(self.body)
        return size + sum(map(len, self.arrays)) if self.arrays else size

    @property
    def begun(self) -> bool:
        """A piece of it is numbered, and another one is not."""
        return self.section > 0 or self.offset > 0


class _Batch(msgspec.Struct, eq=False):
    """Whole envelopes that were sent in one frame: the pieces `first`, `first + 1` ..."""

    first: int
    items: list[Item]
    num_bytes: int

    @property
    def last(self) -> int:
        return self.first + len(self.items) - 1

    def frame(self, acks: tuple[int, int], lane: int) -> bytes:
        return pack_data(acks, lane, self.first, [item.body for item in self.items])

    def drop(self, count: int) -> int:
        """Forget what is acknowledged; return its size."""
        size = sum(len(item.body) for item in self.items[:count])
        self.items = self.items[count:]
        self.first += count
        self.num_bytes -= size
        return size


class _Fragment(msgspec.Struct, eq=False):
    """One piece of a long envelope, or of an array."""

    first: int
    item: Item
    data: memoryview
    more: bool
    cut: bool

    @property
    def last(self) -> int:
        return self.first

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    @property
    def items(self) -> list[Item]:
        return [self.item]

    def frame(self, acks: tuple[int, int], lane: int) -> bytearray:
        return pack(Part(acks, lane, self.first, self.more, self.data, self.cut))


_Sent: TypeAlias = _Batch | _Fragment


class Lane:
    """One direction out and one direction in of a lane."""

    def __init__(self, index: int, limits: Limits) -> None:
        self.index = index
        self._limits = limits
        self.queue: deque[Item] = deque()
        self.queue_bytes = 0
        self.flight: deque[_Sent] = deque()
        self.flight_bytes = 0
        self.resend: deque[_Sent] = deque()
        self._last_seq = 0
        self.acked = 0
        self.delivered = 0
        self._assembly: Assembly | None = None

    # --- out

    def push(self, item: Item) -> bool:
        """Queue an envelope; False if the queue is full."""
        size = item.num_bytes
        limits = self._limits
        if len(self.queue) >= limits.queue_messages or self.queue_bytes + size > limits.queue_bytes:
            return False
        self.queue.append(item)
        self.queue_bytes += size
        return True

    @property
    def num_in_flight(self) -> int:
        """Pieces that are not acknowledged."""
        return self._last_seq - self.acked

    def pass_through(self, item: Item, acks: tuple[int, int]) -> bytes | None:
        """Number an envelope that nothing stands before and return its frame; None if it is long,
        or the window full: such a one must be queued.
        """
        size = len(item.body)
        if item.arrays or size > self._limits.fragment_bytes:
            return None
        if self.flight and self._is_full(size):
            return None
        seq = self._last_seq = self._last_seq + 1
        self.flight.append(_Batch(seq, [item], size))
        self.flight_bytes += size
        return pack_data(acks, self.index, seq, (item.body,))

    def pull(self, acks: tuple[int, int]) -> bytes | bytearray | None:
        """Return the next frame, or None if there is nothing to send or no room in the window."""
        if self.resend:
            return self.resend.popleft().frame(acks, self.index)
        if not self.queue:
            return None
        first = self.queue[0]
        if first.arrays or len(first.body) > self._limits.fragment_bytes:
            return self._pull_fragment(acks)
        return self._pull_batch(acks)

    def _number(self, sent: _Sent, count: int, num_bytes: int) -> None:
        self._last_seq += count
        self.flight.append(sent)
        self.flight_bytes += num_bytes
        self.queue_bytes -= num_bytes

    def _is_full(self, size: int) -> bool:
        """Tell whether the window has no room; an empty one takes anything."""
        return bool(self.flight) and (
            self.num_in_flight >= self._limits.window_messages
            or self.flight_bytes + size > self._limits.window_bytes
        )

    def _pull_batch(self, acks: tuple[int, int]) -> bytes | None:
        """Number envelopes that fit into one frame together, or one that fills it."""
        queue = self.queue
        size = len(queue[0].body)
        if self.flight and self._is_full(size):
            return None
        items = [queue.popleft()]
        bodies = [items[0].body]
        if queue:
            size = self._fill(items, bodies, size)
        batch = _Batch(self._last_seq + 1, items, size)
        self._number(batch, len(items), size)
        return pack_data(acks, self.index, batch.first, bodies)

    def _fill(self, items: list[Item], bodies: list[bytes], size: int) -> int:
        """Add what fits into the frame, and into the window; return the size of all."""
        queue, limits = self.queue, self._limits
        most = min(_BATCH_BYTES, limits.window_bytes - self.flight_bytes)
        count = limits.window_messages - self.num_in_flight
        while queue and len(items) < count:
            item = queue[0]
            body = item.body
            size += len(body)
            if size > most or item.arrays or len(body) > limits.fragment_bytes:
                return size - len(body)
            items.append(queue.popleft())
            bodies.append(body)
        return size

    def _pull_fragment(self, acks: tuple[int, int]) -> bytearray | None:
        """Number the next piece of a long envelope."""
        item = self.queue[0]
        section = item.arrays[item.section - 1] if item.section else item.body
        begin = item.offset
        end = min(begin + self._limits.fragment_bytes, len(section))
        if self._is_full(end - begin):
            return None
        cut = end == len(section)
        item.section, item.offset = (item.section + 1, 0) if cut else (item.section, end)
        more = item.section <= len(item.arrays)
        if not more:
            self.queue.popleft()
        data = memoryview(section)[begin:end]
        fragment = _Fragment(self._last_seq + 1, item, data, more, cut and more)
        self._number(fragment, 1, end - begin)
        return fragment.frame(acks, self.index)

    def on_ack(self, seq: int) -> None:
        """The peer has every piece up to `seq`."""
        if seq <= self.acked:
            return
        if seq > self._last_seq:
            msg = f"the peer acknowledges piece {seq}; the last one sent is {self._last_seq}"
            raise ProtocolError(msg)
        self.acked = seq
        flight, resend = self.flight, self.resend
        while flight and flight[0].last <= seq:
            self.flight_bytes -= flight.popleft().num_bytes
        while resend and resend[0].last <= seq:
            resend.popleft()
        if flight and flight[0].first <= seq:
            batch = flight[0]
            assert isinstance(batch, _Batch)  # noqa: S101 - a fragment is one piece
            self.flight_bytes -= batch.drop(seq + 1 - batch.first)

    def rewind(self) -> None:
        """Send again, on a new connection, everything that is not acknowledged."""
        self.resend = self.flight.copy()

    def expire(self, now: float) -> Iterator[Item]:
        """Take what is past its deadline out of the queue; what is begun must be finished."""
        begun = self.queue.popleft() if self.queue and self.queue[0].begun else None
        while self.queue and self.queue[0].deadline <= now:
            item = self.queue.popleft()
            self.queue_bytes -= item.num_bytes
            yield item
        if begun is not None:
            self.queue.appendleft(begun)

    def outstanding(self) -> Iterator[Item]:
        """Yield, in order, each envelope that the peer has not acknowledged to its end."""
        last: Item | None = None
        for item in (*(item for sent in self.flight for item in sent.items), *self.queue):
            if item is not last:
                last = item
                yield item

    # --- in

    def _known(self, seq: int, count: int) -> int:
        """Return how many of the pieces `seq` ... are duplicates."""
        known = self.delivered + 1 - seq
        if seq < 1 or known < 0:
            msg = f"piece {seq} follows on piece {self.delivered}: pieces are missing between them"
            raise ProtocolError(msg)
        return min(known, count)

    def on_data(self, frame: Data[Body]) -> list[Envelope]:
        """Return the envelopes that are new."""
        items = frame.items
        if frame.seq != self.delivered + 1:
            items = items[self._known(frame.seq, len(items)) :]
        if items and self._assembly is not None:
            raise ProtocolError("an envelope was cut short by another one")
        self.delivered += len(items)
        return items

    def on_part(self, part: Part) -> list[Envelope]:
        """Return the envelope that the fragment completes, if it does."""
        if self._known(part.seq, 1):
            return []
        assembly = self._assembly or Assembly(self._limits.message_bytes)
        envelope = assembly.add(part)
        self.delivered += 1
        self._assembly = None if envelope is not None else assembly
        return [] if envelope is None else [envelope]
