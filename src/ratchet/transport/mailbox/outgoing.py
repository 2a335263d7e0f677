"""What a session has to send, written to the connection that there is.

Consumes the envelopes of a session and the acks that it owes, produces frames. Messages of one turn
of the loop share frames; one that comes alone is written at once. Waits for room in the socket and
for a copy that a thread makes: both end in `pump`, and so does a new connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from ratchet.transport.mailbox.connection import Connection
from ratchet.transport.mailbox.flight import Item
from ratchet.transport.mailbox.session import Session
from ratchet.transport.mailbox.shared import Loan

_GATHER_S: Final = 50e-6
"""What follows on a write within this time waits for what else this turn of the loop sends."""
_GATHER_BYTES: Final = 16 << 10
"""Gathered messages of this size are written at once: the peer need not wait for all of them."""
_TURN_BYTES: Final = 1 << 20
"""After so many bytes other work of the loop comes first, however fast the socket takes them."""


class Outgoing:
    """The writing half of the link to a peer."""

    def __init__(
        self, session: Session, ack_delay_s: float, copy: Callable[[Loan], asyncio.Future[bool]]
    ) -> None:
        self.connection: Connection | None = None
        self.wrote = False
        """since whoever looks at it has last reset it"""
        self._session = session
        self._ack_delay_s = ack_delay_s
        self._copy = copy
        self._loop = asyncio.get_running_loop()
        self._gathering = False
        self._gathered_bytes = 0
        self._written_at = -1.0
        self._ack_timer: asyncio.TimerHandle | None = None

    def write_now(self, lane: int, item: Item, now: float) -> bool:
        """Write an envelope that comes alone, if there is room and nothing stands before it; tell
        whether. Else it must be queued.
        """
        connection = self.connection
        if connection is None or connection.paused or self._gathering:
            return False
        alone = now - self._written_at >= _GATHER_S
        self._written_at = now
        frame = self._session.pass_through(lane, item) if alone else None
        if frame is None:
            return False
        self._write(connection, frame)
        return True

    def queued(self, item: Item) -> None:
        """Write what was queued, with what follows in this turn of the loop."""
        if not self._gathering:
            self.gather()
            return
        self._gathered_bytes += len(item.body)
        if self._gathered_bytes >= _GATHER_BYTES:
            self.pump()

    def gather(self) -> None:
        """Write at the end of this turn of the loop."""
        if not self._gathering:
            self._gathering = True
            self._gathered_bytes = 0
            self._loop.call_soon(self._on_gathered)

    def _on_gathered(self) -> None:
        self._gathering = False
        self.pump()

    def pump(self) -> None:
        """Write until the session has no more, the socket is full, or others must have a turn."""
        connection = self.connection
        if connection is None:
            return
        self._gathered_bytes = 0
        left = _TURN_BYTES
        while not connection.paused and (frame := self._session.pull()) is not None:
            if frame:
                self._write(connection, frame)
            left -= len(frame) or _TURN_BYTES
            if left <= 0:
                self.gather()
                return

    def copy(self, loan: Loan) -> asyncio.Future[bool]:
        """Have a loan filled, and go on writing then."""
        copying = self._copy(loan)
        copying.add_done_callback(self._on_copied)
        return copying

    def _on_copied(self, copying: asyncio.Future[bool]) -> None:
        if not copying.cancelled():
            copying.exception()  # the lane sees it, if it still has the message
        self.pump()

    def acknowledge(self) -> None:
        """Write the acks that are owed, soon: a frame may carry them until then."""
        if not self._session.owes:
            return
        if self._session.owes_much:
            self.write_ack()
        elif self._ack_timer is None:
            self._ack_timer = self._loop.call_later(self._ack_delay_s, self._on_ack_timer)

    def write_ack(self) -> None:
        """Write the acks now."""
        if self.connection is not None:
            self._write(self.connection, self._session.ack())

    def _on_ack_timer(self) -> None:
        self._ack_timer = None
        if self._session.owes:
            self.write_ack()

    def _write(self, connection: Connection, frame: bytes | bytearray) -> None:
        self.wrote = True
        connection.write(frame)

    def close(self) -> None:
        """Write nothing more by itself."""
        if self._ack_timer is not None:
            self._ack_timer.cancel()
