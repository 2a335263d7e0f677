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

from typing import Final

from ratchet.errors import ProtocolError
from ratchet.transport.mailbox.codec import pack
from ratchet.transport.mailbox.flight import Item
from ratchet.transport.mailbox.frames import BULK, CONTROL, Ack, Body, Data, Envelope, Part, Shared
from ratchet.transport.mailbox.lane import Copy, Lane
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.peer_files import PeerFiles

_ACK_BYTES: Final = 1 << 20
"""After so many bytes an ack goes out at once: what the peer holds for us it cannot use again."""


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
        self.may_read = True
        """arrays that the peer shares were never out of reach"""
        self._owed = 0
        """pieces received since the last acks went out"""
        self._owed_bytes = 0
        self._lanes = (Lane(CONTROL, self._limits), Lane(BULK, self._limits))

    # --- what the driver does

    def push(self, lane: int, item: Item) -> bool:
        """Queue an envelope for the peer; False if the queue is full."""
        return self._lanes[lane].push(item)

    def pass_through(self, lane: int, item: Item) -> bytes | None:
        """Return the frame of an envelope that nothing stands before; None if it must be queued."""
        if self.has_more:
            return None
        control, bulk = self._lanes
        frame = self._lanes[lane].pass_through(item, (control.delivered, bulk.delivered))
        if frame is not None:
            self._owed = self._owed_bytes = 0
        return frame

    def pull(self) -> bytes | bytearray | None:
        """Return the next frame to write: control before bulk, each with acks; None if there is
        nothing, or no room in the window; empty if other work should have its turn first.
        """
        control, bulk = self._lanes
        acks = (control.delivered, bulk.delivered)
        frame = control.pull(acks) or bulk.pull(acks)
        if frame:
            self._owed = self._owed_bytes = 0
        return frame

    def ack(self) -> bytearray:
        """Return a frame with the acks alone."""
        self._owed = self._owed_bytes = 0
        return pack(Ack(self.delivered))

    def receive(self, frame: Data[Body] | Part | Shared | Ack, num_bytes: int) -> list[Envelope]:
        """Take a frame of `num_bytes`; return the envelopes that it completes, in order.

        Raises:
            ProtocolError: a gap, an ack of what was never sent, a lane that does not exist; the
                session cannot go on.
            Unreadable: shared arrays are out of reach: the frame is not taken, and the connection
                is of no more use.
        """
        control, bulk = self._lanes
        control_ack, bulk_ack = frame.acks
        if control_ack != control.acked:
            control.on_ack(control_ack)
        if bulk_ack != bulk.acked:
            bulk.on_ack(bulk_ack)
        if isinstance(frame, Ack):
            return []
        if not 0 <= frame.lane < len(self._lanes):
            raise ProtocolError(f"there is no lane {frame.lane}")
        lane = self._lanes[frame.lane]
        before = lane.delivered
        if isinstance(frame, Part):
            fresh, pieces = lane.on_part(frame), 1
        elif isinstance(frame, Shared):
            fresh, pieces = lane.on_shared(frame), frame.count
            num_bytes += frame.num_bytes
        else:
            fresh, pieces = lane.on_data(frame), len(frame.items)
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
        """A quarter of the peer's window waits for our acks, or more than it should hold for us."""
        return self._owed * 4 >= self._limits.window_messages or self._owed_bytes >= min(
            self._limits.window_bytes // 4, _ACK_BYTES
        )

    @property
    def has_more(self) -> bool:
        """Something waits to be written: for the socket, or for room in the window."""
        control, bulk = self._lanes
        return bool(control.queue or bulk.queue or control.resend or bulk.resend)

    @property
    def num_queued(self) -> int:
        """Envelopes that are not on their way yet."""
        return sum(len(lane.queue) for lane in self._lanes)

    @property
    def num_in_flight(self) -> int:
        """Pieces that are not acknowledged."""
        return sum(lane.num_in_flight for lane in self._lanes)

    @property
    def idle(self) -> bool:
        """Nothing is queued and nothing unacknowledged."""
        control, bulk = self._lanes
        return not (control.flight or bulk.flight or control.queue or bulk.queue)

    # --- from one connection to the next, and from one life to the next

    def delivered_of(self, peer_life: str) -> tuple[int, int]:
        """Return what to tell a peer with this life about what has arrived from it."""
        return self.delivered if self.peer_life == peer_life else (0, 0)

    def knows_other(self, peer_life: str) -> bool:
        """Tell whether this session was with another life of the peer."""
        return self.peer_life is not None and self.peer_life != peer_life

    def share(self, *, lends: bool, files: PeerFiles | None, copy: Copy | None = None) -> None:
        """Say, before `resume`, what the ends of the new connection can read of each other: the
        peer the files of this process, and this process those of the peer; and who copies much
        into such files, if not `pull`.
        """
        for lane in self._lanes:
            lane.lends, lane.files, lane.copy = lends, files, copy

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
