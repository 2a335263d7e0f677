"""One other node: the session with it, over whatever connection there is at the moment.

Consumes envelopes to send and frames received; produces frames, deliveries, and verdicts about the
peer's life. Waits for the peer to be reachable: a dial with backoff, unblocked by the peer's
listener or by its own dial to us, ended by the delivery deadline of what waits.

How a cut is told from a death. A node listens for as long as it lives and the kernel closes its
listener with it. So when a connection is lost both ends dial at once. If the address refuses (or
the socket's file is gone, or someone else answers there) the peer is dead. If the peer answers
under the same lives, it was a cut, and the session goes on. If it answers under another life it has
restarted, or has given us up. If it does not answer at all it is dead after `dead_s`; so is a
connected peer that is silent for `dead_s`. A heartbeat alone never kills in less: a busy machine
looks the same.

A verdict ends the session: what was not acknowledged becomes dead letters, asks end with
`ActorDead`, watchers are told. What is sent from then on waits for the next life of the peer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from ratchet.errors import ActorDead, AuthFailed, ProtocolError, RatchetError
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.codec import (
    Bye,
    LinkFrame,
    pack,
)
from ratchet.transport.mailbox.connection import Connection
from ratchet.transport.mailbox.dial import Dialler
from ratchet.transport.mailbox.flight import Item
from ratchet.transport.mailbox.hub import Hub
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.session import Session
from ratchet.transport.mailbox.shared import Array, Loan, Unreadable

_MAX_RETIRED: Final = 64
_GATHER_S: Final = 50e-6
"""What follows on a write within this time waits for what else this turn of the loop sends."""
_GATHER_BYTES: Final = 16 << 10
"""Gathered messages of this size are written at once: the peer need not wait for all of them."""
_TURN_BYTES: Final = 1 << 20
"""After so many bytes other work of the loop comes first, however fast the socket takes them."""

SessionKey = tuple[str, str | None]


class Peer:
    """The link to one node."""

    def __init__(self, name: str, hub: Hub, limits: Limits, new_life: Callable[[], str]) -> None:
        self.name = name
        self.incarnation: str | None = None
        self.gone: RatchetError | None = None
        """how its last life ended; None before the first and during each"""
        self.failure: RatchetError | None = None
        """why it will not be dialled again"""
        self.silent_s = 0.0
        """how long nothing has arrived on an open connection"""
        self.session = Session(new_life(), limits)
        self._hub = hub
        self._limits = limits
        self._new_life = new_life
        self._loop = asyncio.get_running_loop()
        self._connection: Connection | None = None
        self._opened_at = 0.0
        self._cut_at: float | None = None
        self._stale: Address | None = None
        """what was last told of where it listens, if that was of another life of it: the very
        object, as the next life may tell of the same place
        """
        self._refused_at: Address | None = None
        self._replaced_till: float | None = None
        """until when it is not asked again whether this node was replaced"""
        self._dialler = Dialler(self, hub, limits, self._wants_connection)
        self._retired: deque[str] = deque(maxlen=_MAX_RETIRED)
        self._earlier: deque[str] = deque(maxlen=_MAX_RETIRED)
        """incarnations that had a session with this life of ours, before the present one"""
        self._gathering = False
        self._gathered_bytes = 0
        self._written_at = -1.0
        self._ack_timer: asyncio.TimerHandle | None = None
        self._heard = False
        self._wrote = False

    @property
    def session_key(self) -> SessionKey:
        """Name the session: it changes when either end begins a new life."""
        return self.session.life, self.session.peer_life

    @property
    def trouble(self) -> RatchetError | None:
        """Why nothing can be told to it now: it will not be dialled again, or its last life is over
        and no other has begun.
        """
        return self._still_refused() or self.gone

    @property
    def connected(self) -> bool:
        """A connection is open."""
        return self._connection is not None

    # --- sending

    def send(self, lane: int, envelope: bytes, arrays: tuple[Array, ...] = ()) -> None:
        """Queue an encoded envelope, and the arrays that travel beside it. What cannot be delivered
        comes back through `Hub.lost`.
        """
        now = self._loop.time()
        item = Item(envelope, now + self._limits.delivery_s, arrays)
        if self.failure is not None and (refusal := self._still_refused()):
            self._hub.lost(self, [item], refusal)
        elif item.num_bytes > self._limits.message_bytes:
            text = f"{item.num_bytes} bytes; a message may have {self._limits.message_bytes}"
            self._hub.lost(self, [item], ProtocolError(text))
        elif not (self._is_free(now) and self._pass_through(lane, item)):
            self._queue(lane, item)

    def _is_free(self, now: float) -> bool:
        """Tell whether a message would be written at once: it comes alone, and there is room."""
        connection = self._connection
        if connection is None or connection.paused or self._gathering:
            return False
        alone = now - self._written_at >= _GATHER_S
        self._written_at = now
        return alone

    def _pass_through(self, lane: int, item: Item) -> bool:
        frame = self.session.pass_through(lane, item)
        if frame is None or self._connection is None:
            return False
        self._write(self._connection, frame)
        return True

    def _queue(self, lane: int, item: Item) -> None:
        if not self.session.push(lane, item):
            self._hub.lost(self, [item], ActorDead(f"too much waits for {self.name} already"))
        elif self._connection is None:
            self._dialler.start()
        elif self._gathering:
            self._gathered_bytes += len(item.body)
            if self._gathered_bytes >= _GATHER_BYTES:
                self._pump()
        else:
            self._gather()

    def _gather(self) -> None:
        """Write at the end of this turn of the loop."""
        if not self._gathering:
            self._gathering = True
            self._gathered_bytes = 0
            self._loop.call_soon(self._on_gathered)

    def _on_gathered(self) -> None:
        self._gathering = False
        self._pump()

    def _pump(self) -> None:
        """Write until the session has no more, the socket is full, or others must have a turn."""
        connection = self._connection
        if connection is None:
            return
        self._gathered_bytes = 0
        left = _TURN_BYTES
        while not connection.paused and (frame := self.session.pull()) is not None:
            if frame:
                self._write(connection, frame)
            left -= len(frame) or _TURN_BYTES
            if left <= 0:
                self._gather()
                return

    def _copy(self, loan: Loan) -> asyncio.Future[bool]:
        copying = self._hub.copy(loan)
        copying.add_done_callback(self._on_copied)
        return copying

    def _on_copied(self, copying: asyncio.Future[bool]) -> None:
        if not copying.cancelled():
            copying.exception()  # the lane sees it, if it still has the message
        self._pump()

    def _write(self, connection: Connection, frame: bytes | bytearray) -> None:
        self._wrote = True
        connection.write(frame)

    def _on_ack_timer(self) -> None:
        self._ack_timer = None
        if self._connection is not None and self.session.owes:
            self._write(self._connection, self.session.ack())

    # --- what the connection tells

    def on_frame(self, connection: Connection, frame: LinkFrame, num_bytes: int) -> None:
        """Take a frame. A connection that was replaced is closed, and brings none."""
        self._heard = True
        if isinstance(frame, Bye):
            self.end(ActorDead(f"{self.name} has stopped: {frame.reason}"), in_order=True)
            return
        session = self.session
        envelopes = session.receive(frame, num_bytes)
        if envelopes:
            self._hub.deliver(self, envelopes)
        if session.has_more:
            self._gather()
        elif session.idle:
            self._hub.settled()
        if not session.owes:
            return
        if session.owes_much:
            self._write(connection, session.ack())
        elif self._ack_timer is None:
            self._ack_timer = self._loop.call_later(self._limits.ack_delay_s, self._on_ack_timer)

    def on_room(self) -> None:
        """The socket takes bytes again."""
        self._pump()

    def on_broken(self, connection: Connection, error: ProtocolError) -> None:
        """What the peer sends cannot be followed, and sending it again would not mend that."""
        connection.abort()
        if connection is self._connection:
            self._hub.log.error("link_broken", peer=self.name, error=str(error))
            self.end(ActorDead(f"the link to {self.name} broke: {error}"))

    def on_unreadable(self, connection: Connection, error: Unreadable) -> None:
        """Arrays that the peer shares are out of reach: it has ended, or given this node up, or
        this process has no more descriptors. The next connection brings them as bytes.
        """
        self.session.may_read = False
        note = self._news if isinstance(error.__cause__, FileNotFoundError) else self._alarm
        note("memory_not_shared", peer=self.name, error=str(error))
        connection.abort()

    def on_cut(self, connection: Connection) -> None:
        """The connection is gone: dial, to learn whether the peer is."""
        if connection is not self._connection:
            return
        self._connection = None
        self._cut_at = self._loop.time()
        self._news("link_cut", peer=self.name)
        self._dialler.start(yielding=self._hub.name > self.name)

    def admits(self, incarnation: str) -> bool:
        """Tell whether an incarnation is not one that a newer one has replaced: by the registry's
        word, or as long as there is none, by the order in which they came here.
        """
        newest = self._hub.is_newest(self.name, incarnation)
        return incarnation not in self._retired if newest is None else newest

    def _retire(self, incarnation: str, newer: str) -> None:
        """Let an incarnation in no more, unless the registry has brought the other one back: its
        word on this one is still to come.
        """
        if not self._hub.is_newest(self.name, newer):
            self._retired.append(incarnation)

    def _readmit(self, incarnation: str) -> None:
        """Begin anew with a process that was replaced here. It may remember the session that it had
        before, so it has to dial once more, and finds another one.
        """
        if incarnation in self._retired:
            self._retired.remove(incarnation)
        self._give_up(ActorDead(f"{self.name} has been replaced"), life=self._new_life())

    def take(self, connection: Connection) -> bool:
        """Use a connection that has just opened, unless the present one is to be kept."""
        hello = connection.handshake.peer
        # a newer process may have come during the hello
        if hello is None or not self.admits(hello.incarnation) or not self._prefers(connection):
            return False
        if hello.incarnation in self._retired or hello.incarnation in self._earlier:
            self._readmit(hello.incarnation)
            return False
        previous_life = self.incarnation
        if previous_life is not None and previous_life != hello.incarnation:
            self._retire(previous_life, hello.incarnation)
            self._stale = self._hub.where(self.name)
        previous, self._connection = self._connection, None
        if self.session.knows_other(connection.handshake.peer_life):
            same = self.incarnation == hello.incarnation
            if previous_life is not None and not same:
                self._earlier.append(previous_life)
            text = f"{self.name} gave this node up" if same else f"{self.name} has restarted"
            self._give_up(ActorDead(text), life=self.session.life)
        if previous is not None:
            previous.abort()
        try:
            self.session.share(
                lends=connection.handshake.lends,
                files=connection.handshake.readable,
                copy=self._copy,
            )
            self.session.resume(connection.handshake.peer_life, connection.handshake.delivered)
        except ProtocolError as error:
            self.end(ActorDead(f"the link to {self.name} broke: {error}"))
            raise
        self.incarnation = hello.incarnation
        self.gone = self.failure = self._cut_at = None
        self.silent_s = 0.0
        self._connection = connection
        self._opened_at = self._loop.time()
        self._heard = True
        self._news("link_open", peer=self.name, incarnation=self.incarnation)
        self._gather()
        return True

    def _prefers(self, connection: Connection) -> bool:
        """Of two dials that cross, both ends keep the one of the lexicographically smaller name.

        They cross only if the older one opened within the time that a hello may take; after that
        the peer dials because it has lost the older one, whatever we still believe of it.
        """
        current = self._connection
        if current is None or current.handshake.peer is None or connection.handshake.peer is None:
            return True
        if current.handshake.peer.incarnation != connection.handshake.peer.incarnation:
            return True
        if self._loop.time() - self._opened_at > self._limits.hello_s:
            return True
        smaller_dials = self._hub.name < self.name
        same_dialler = connection.handshake.dials == current.handshake.dials
        return same_dialler or connection.handshake.dials == smaller_dials

    # --- dialling

    def _wants_connection(self) -> bool:
        """Something waits for the peer, or its fate is not known."""
        return self._connection is None and (
            not self.session.idle or self.session.peer_life is not None
        )

    def on_absent(self) -> None:
        """Nobody is at its address: if it was there before, it is dead."""
        of_another = self._stale is not None and self._hub.where(self.name) is self._stale
        if self.session.peer_life is not None and self._connection is None and not of_another:
            self.end(ActorDead(f"the process of {self.name} has ended"))

    def on_refused(self, error: RatchetError) -> None:
        """It will not have us, and asking again would not change that. Whoever knew us before and
        does not now is somebody else, at an address that was the peer's.
        """
        if self._connection is not None:
            return
        if self.session.peer_life is not None and isinstance(error, AuthFailed):
            self.end(ActorDead(f"the process of {self.name} has ended: {error}"))
            return
        self._hub.log.error("link_refused", peer=self.name, error=str(error))
        self.failure = error
        self._refused_at = self._dialler.at
        if isinstance(error, ActorDead):
            self._replaced_till = self._loop.time() + self._limits.hello_s
        self._give_up(error, life=self._new_life())

    def _still_refused(self) -> RatchetError | None:
        """Return why it will not be dialled. It will be, once it is said to listen elsewhere; and
        who was refused as replaced asks again, as the registry may think otherwise.
        """
        if self._replaced_till is not None and self._loop.time() >= self._replaced_till:
            self.failure = self._refused_at = self._replaced_till = None
        if self._refused_at is not None and isinstance(self.failure, AuthFailed):
            now = self._hub.where(self.name)
            if now is not None and now != self._refused_at:
                self.failure = self._refused_at = None
        return self.failure

    # --- verdicts

    def end(self, error: RatchetError, *, in_order: bool = False) -> None:
        """This life of the peer is over, for this node."""
        note = self._news if in_order else self._alarm
        note("peer_ended", peer=self.name, reason=str(error))
        self.gone = error
        self._give_up(error, life=self._new_life())

    def _give_up(self, error: RatchetError, *, life: str) -> None:
        if life != self.session.life:
            self._earlier.clear()
        lost = self.session.end(life)
        self._cut_at = None
        self.silent_s = 0.0
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        self._hub.lost(self, lost, error)
        self._hub.ended(self, error)

    @property
    def _news(self) -> Callable[..., Any]:
        """Logs what is in order. Of a visitor, whom nobody can dial, nothing is news."""
        return self._hub.log.info if self._hub.where(self.name) else self._hub.log.debug

    @property
    def _alarm(self) -> Callable[..., Any]:
        """Logs what is not; a visitor may leave as it likes."""
        return self._hub.log.warning if self._hub.where(self.name) else self._hub.log.debug

    def tick(self, now: float) -> None:
        """Once per heartbeat: end what has waited too long, and keep the link warm."""
        if late := self.session.expire(now):
            text = (
                f"{self.name} could not be reached within {self._limits.delivery_s:g} s: "
                f"{self._dialler.last_error}"
            )
            self._hub.lost(self, late, ActorDead(text))
        if self._connection is not None:
            self._tick_open(self._connection)
        elif self._cut_at is not None and now - self._cut_at >= self._limits.dead_s:
            self.end(ActorDead(f"{self.name} did not come back within {self._limits.dead_s:g} s"))

    def _tick_open(self, connection: Connection) -> None:
        if not self._wrote:
            self._write(connection, self.session.ack())
        self._wrote = False
        if self._heard:
            self._heard = False
            self.silent_s = 0.0
            return
        # counted in ticks and not by the clock: if this process was stopped, the peer was not
        limits = self._limits
        before = self.silent_s
        self.silent_s += limits.heartbeat_s
        if before < limits.suspect_s <= self.silent_s:
            self._alarm("peer_silent", peer=self.name, silent_s=self.silent_s)
        if self.silent_s >= limits.dead_s:
            self.end(ActorDead(f"{self.name} was silent for {self.silent_s:g} s"))

    # --- the end of this node

    @property
    def spent(self) -> bool:
        """Nothing is known of it, and nothing waits for it, that a new `Peer` would not have."""
        return (
            self._connection is None
            and self.session.peer_life is None
            and self.session.idle
            and not self._retired
        )

    @property
    def settled(self) -> bool:
        """Everything that can be delivered is."""
        return self.trouble is not None or self.session.idle

    async def close(self, reason: str) -> None:
        """Take leave of the peer, and account for what is left."""
        await self._dialler.stop()
        connection, self._connection = self._connection, None
        if connection is not None:
            if self.session.owes:  # what has arrived is not to be taken for lost
                connection.write(self.session.ack())
            connection.write(pack(Bye(reason)))
            connection.close()
        if self._ack_timer is not None:
            self._ack_timer.cancel()
        error = self.failure = ActorDead(f"{self._hub.name} has stopped")
        self._replaced_till = None
        self._hub.lost(self, self.session.end(self._new_life()), error)
        self._hub.ended(self, error)
