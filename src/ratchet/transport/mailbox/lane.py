"""One lane of a session: a numbered stream out and a numbered stream in. Pure.

Consumes envelopes to send, acks and frames; produces frames to write and envelopes to deliver. What
does not fit into the window stays queued until acks make room.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from ratchet.errors import ProtocolError
from ratchet.transport.mailbox.assembly import Assembly, decode_shared
from ratchet.transport.mailbox.codec import pack_data
from ratchet.transport.mailbox.flight import Batch, Copying, Fragment, Item, Run, Sent
from ratchet.transport.mailbox.frames import Body, Data, Envelope, Part, Shared
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.peer_files import PeerFiles
from ratchet.transport.mailbox.shared import SHARED_BYTES, Loan

_BATCH_BYTES: Final = 64 << 10
"""Small envelopes share a frame up to this size."""
_FILL_BYTES: Final = 512 << 10
"""So much is copied into shared memory in one go."""
_THREAD_BYTES: Final = 1 << 20
"""To copy so much is worth a thread's while, if there is one."""

Copy: TypeAlias = Callable[[Loan], Copying]
"""Fills a loan on another thread; whoever gives it to a lane pulls once it is done."""


class Lane:
    """One direction out and one direction in of a lane."""

    def __init__(self, index: int, limits: Limits) -> None:
        self.index = index
        self._limits = limits
        self.queue: deque[Item] = deque()
        self.queue_bytes = 0
        self.flight: deque[Sent] = deque()
        self.flight_bytes = 0
        self.resend: deque[Sent] = deque()
        self._last_seq = 0
        self.acked = 0
        self.delivered = 0
        self._assembly: Assembly | None = None
        self.lends = False
        """the peer can read files of this process: large arrays are shared"""
        self.files: PeerFiles | None = None
        """those of the peer, if they can be read here"""
        self.copy: Copy | None = None

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
        self.flight.append(Batch(seq, [item], size))
        self.flight_bytes += size
        return pack_data(acks, self.index, seq, (item.body,))

    def pull(self, acks: tuple[int, int]) -> bytes | bytearray | None:
        """Return the next frame, or None if there is nothing to send or no room in the window; an
        empty one if there will be a frame, and other work should have its turn first.
        """
        if self.resend:
            return self.resend.popleft().frame(acks, self.index)
        if not self.queue:
            return None
        first = self.queue[0]
        if first.arrays or len(first.body) > self._limits.fragment_bytes:
            return self._pull_run(acks) if self._is_shared(first) else self._pull_fragment(acks)
        return self._pull_batch(acks)

    def _number(self, sent: Sent, count: int, num_bytes: int) -> None:
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
        batch = Batch(self._last_seq + 1, items, size)
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
        item, limit = self.queue[0], self._limits.fragment_bytes
        item.loan = item.copying = None
        size = item.next_bytes(limit)
        if self._is_full(size):
            return None
        fragment = Fragment(self._last_seq + 1, item, *item.cut_off(limit))
        if not fragment.more:
            self.queue.popleft()
        self._number(fragment, 1, size)
        return fragment.frame(acks, self.index)

    def _is_shared(self, item: Item) -> bool:
        """Tell whether the arrays of an envelope go by reference."""
        return (
            self.lends and not (item.begun or item.in_pieces) and item.array_bytes >= SHARED_BYTES
        )

    def _pull_run(self, acks: tuple[int, int]) -> bytes | bytearray | None:
        """Have the arrays copied to where they are shared, while acks make room in the window for
        them; then number them.
        """
        item = self.queue[0]
        try:
            loan = self._lend(item)
            self._lend_ahead()
            if item.copying is None:
                if not loan.fill(_FILL_BYTES):
                    return b""
            elif not item.copying.done():
                return None
            else:
                item.copying.result()
        except OSError:  # to try again at once, which the end of each try would lead to, is no use
            item.in_pieces = True
            return self._pull_fragment(acks)
        if self._is_full(item.num_bytes):
            return None
        self.queue.popleft()
        count = item.count(self._limits.fragment_bytes)
        run = Run(self._last_seq + 1, self._last_seq + count, item, loan)
        item.loan = item.copying = None
        self._number(run, count, item.num_bytes)
        return run.frame(acks, self.index)

    def _lend(self, item: Item) -> Loan:
        """Return where the arrays of an envelope are shared; if they are large and there is a
        thread, it begins to copy them there.
        """
        if item.loan is None:
            item.loan = Loan(item.sections(self._limits.fragment_bytes))
            if self.copy is not None and item.loan.num_bytes >= _THREAD_BYTES:
                item.copying = self.copy(item.loan)
        return item.loan

    def _lend_ahead(self) -> None:
        """Give the thread what comes next, so that it need not wait for this loop."""
        if self.copy is not None and len(self.queue) > 1 and self._is_shared(self.queue[1]):
            with contextlib.suppress(OSError):  # it is tried again when its turn comes
                self._lend(self.queue[1])

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
            if not isinstance(batch, Batch):
                raise ProtocolError(f"the peer acknowledges {seq}, a part of what it has whole")
            self.flight_bytes -= batch.drop(seq + 1 - batch.first)

    def rewind(self) -> None:
        """Send again, on a new connection, everything that is not acknowledged."""
        if not self.lends:
            limit = self._limits.fragment_bytes
            self.flight = deque(
                piece
                for sent in self.flight
                for piece in (sent.fragments(limit) if isinstance(sent, Run) else (sent,))
            )
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

    def on_shared(self, frame: Shared) -> list[Envelope]:
        """Return the envelope, with its arrays where they lie.

        Raises:
            Unreadable: they are out of reach.
        """
        if not 1 <= frame.count <= self._limits.message_bytes:
            raise ProtocolError(f"a message of {frame.count} pieces")
        known = self._known(frame.seq, frame.count)
        if known == frame.count:
            return []
        if known or self._assembly is not None or self.files is None:
            raise ProtocolError("shared arrays came out of turn")
        envelope = decode_shared(frame, self.files, self._limits.message_bytes)
        self.delivered += frame.count
        return [envelope]
