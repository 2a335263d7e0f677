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
from collections.abc import Callable
from typing import Any

from ratchet.errors import ActorDead, AuthFailed, ProtocolError, RatchetError
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.codec import pack
from ratchet.transport.mailbox.connection import Connection
from ratchet.transport.mailbox.dial import Dialler
from ratchet.transport.mailbox.flight import Item
from ratchet.transport.mailbox.frames import Bye, LinkFrame
from ratchet.transport.mailbox.hub import Hub
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.lives import Lives
from ratchet.transport.mailbox.outgoing import Outgoing
from ratchet.transport.mailbox.peer_files import Unreadable
from ratchet.transport.mailbox.refusal import Refusal
from ratchet.transport.mailbox.session import Session
from ratchet.transport.mailbox.shared import Array

SessionKey = tuple[str, str | None]


class Peer:
    """The link to one node."""

    def __init__(self, name: str, hub: Hub, limits: Limits, new_life: Callable[[], str]) -> None:
        self.name = name
        self.lives = Lives(lambda life: hub.is_newest(name, life))
        self.gone: RatchetError | None = None
        """how its last life ended; None before the first and during each"""
        self.silent_s = 0.0
        """how long nothing has arrived on an open connection"""
        self.session = Session(new_life(), limits)
        self._hub = hub
        self._limits = limits
        self._new_life = new_life
        self._loop = asyncio.get_running_loop()
        self.refusal = Refusal(lambda: hub.where(name), self._loop.time)
        self._out = Outgoing(self.session, limits.ack_delay_s, hub.copy)
        self._opened_at = 0.0
        self._cut_at: float | None = None
        self._stale: Address | None = None
        """what was last told of where it listens, if that was of another life of it: the very
        object, as the next life may tell of the same place
        """
        self._dialler = Dialler(self, hub, limits, self._wants_connection)
        self._heard = False

    @property
    def session_key(self) -> SessionKey:
        """Name the session: it changes when either end begins a new life."""
        return self.session.life, self.session.peer_life

    @property
    def trouble(self) -> RatchetError | None:
        """Why nothing can be told to it now: it will not be dialled again, or its last life is over
        and no other has begun.
        """
        return self.refusal.error or self.gone

    @property
    def connected(self) -> bool:
        """A connection is open."""
        return self._out.connection is not None

    # --- sending

    def send(self, lane: int, envelope: bytes, arrays: tuple[Array, ...] = ()) -> None:
        """Queue an encoded envelope, and the arrays that travel beside it. What cannot be delivered
        comes back through `Hub.lost`.
        """
        now = self._loop.time()
        item = Item(envelope, now + self._limits.delivery_s, arrays)
        if refusal := self.refusal.error:
            self._hub.lost(self, [item], refusal)
        elif item.num_bytes > self._limits.message_bytes:
            text = f"{item.num_bytes} bytes; a message may have {self._limits.message_bytes}"
            self._hub.lost(self, [item], ProtocolError(text))
        elif not self._out.write_now(lane, item, now):
            self._queue(lane, item)

    def _queue(self, lane: int, item: Item) -> None:
        if not self.session.push(lane, item):
            self._hub.lost(self, [item], ActorDead(f"too much waits for {self.name} already"))
        elif self._out.connection is None:
            self._dialler.start()
        else:
            self._out.queued(item)

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
            self._out.gather()
        elif session.idle:
            self._hub.settled()
        self._out.acknowledge()

    def on_room(self) -> None:
        """The socket takes bytes again."""
        self._out.pump()

    def on_broken(self, connection: Connection, error: ProtocolError) -> None:
        """What the peer sends cannot be followed, and sending it again would not mend that."""
        connection.abort()
        if connection is self._out.connection:
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
        if connection is not self._out.connection:
            return
        self._out.connection = None
        self._cut_at = self._loop.time()
        self._news("link_cut", peer=self.name)
        self._dialler.start(yielding=self._hub.name > self.name)

    def take(self, connection: Connection) -> bool:
        """Use a connection that has just opened, unless the present one is to be kept."""
        hello = connection.handshake.peer
        # a newer process may have come during the hello
        if hello is None or not self.lives.admits(hello.incarnation):
            return False
        late = self.lives.comes_late(hello.incarnation, connection.made_at)
        if late or not self._prefers(connection):
            return False
        if self.lives.comes_back(hello.incarnation):
            # it may remember the session that it had before: it dials once more, and finds another
            self._give_up(ActorDead(f"{self.name} has been replaced"), life=self._new_life())
            return False
        previous_life = self.lives.present
        if replaces := self.lives.come(hello.incarnation, connection.made_at):
            self._stale = self._hub.where(self.name)
        previous, self._out.connection = self._out.connection, None
        if self.session.knows_other(connection.handshake.peer_life):
            if previous_life is not None and replaces:
                self.lives.had_session(previous_life)
            text = "has restarted" if replaces else "gave this node up"
            self._give_up(ActorDead(f"{self.name} {text}"), life=self.session.life)
        if previous is not None:
            previous.abort()
        try:
            self.session.share(
                lends=connection.handshake.lends,
                files=connection.handshake.readable,
                copy=self._out.copy,
            )
            self.session.resume(connection.handshake.peer_life, connection.handshake.delivered)
        except ProtocolError as error:
            self.end(ActorDead(f"the link to {self.name} broke: {error}"))
            raise
        self.gone = self._cut_at = None
        self.refusal.forget()
        self.silent_s = 0.0
        self._out.connection = connection
        self._opened_at = self._loop.time()
        self._heard = True
        self._news("link_open", peer=self.name, incarnation=hello.incarnation)
        self._out.gather()
        return True

    def _prefers(self, connection: Connection) -> bool:
        """Of two dials that cross, both ends keep the one of the lexicographically smaller name.

        They cross only if the older one opened within the time that a hello may take; after that
        the peer dials because it has lost the older one, whatever we still believe of it.
        """
        current = self._out.connection
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
        return self._out.connection is None and (
            not self.session.idle or self.session.peer_life is not None
        )

    def on_absent(self) -> None:
        """Nobody is at its address: if it was there before, it is dead."""
        of_another = self._stale is not None and self._hub.where(self.name) is self._stale
        if self.session.peer_life is not None and self._out.connection is None and not of_another:
            self.end(ActorDead(f"the process of {self.name} has ended"))

    def on_refused(self, error: RatchetError) -> None:
        """It will not have us, and asking again would not change that. Whoever knew us before and
        does not now is somebody else, at an address that was the peer's.
        """
        if self._out.connection is not None:
            return
        if self.session.peer_life is not None and isinstance(error, AuthFailed):
            self.end(ActorDead(f"the process of {self.name} has ended: {error}"))
            return
        self._hub.log.error("link_refused", peer=self.name, error=str(error))
        self.refusal.note(error, self._dialler.at, self._limits.hello_s)
        self._give_up(error, life=self._new_life())

    # --- verdicts

    def end(self, error: RatchetError, *, in_order: bool = False) -> None:
        """This life of the peer is over, for this node."""
        note = self._news if in_order else self._alarm
        note("peer_ended", peer=self.name, reason=str(error))
        self.gone = error
        self._give_up(error, life=self._new_life())

    def _give_up(self, error: RatchetError, *, life: str) -> None:
        if life != self.session.life:
            self.lives.begin_anew()
        lost = self.session.end(life)
        self._cut_at = None
        self.silent_s = 0.0
        connection, self._out.connection = self._out.connection, None
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
        if self._out.connection is not None:
            self._tick_open()
        elif self._cut_at is not None and now - self._cut_at >= self._limits.dead_s:
            self.end(ActorDead(f"{self.name} did not come back within {self._limits.dead_s:g} s"))

    def _tick_open(self) -> None:
        if not self._out.wrote:
            self._out.write_ack()
        self._out.wrote = False
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
            self._out.connection is None
            and self.session.peer_life is None
            and self.session.idle
            and not self.lives.has_replaced
        )

    @property
    def settled(self) -> bool:
        """Everything that can be delivered is."""
        return self.trouble is not None or self.session.idle

    async def close(self, reason: str) -> None:
        """Take leave of the peer, and account for what is left."""
        await self._dialler.stop()
        connection, self._out.connection = self._out.connection, None
        if connection is not None:
            if self.session.owes:  # what has arrived is not to be taken for lost
                connection.write(self.session.ack())
            connection.write(pack(Bye(reason)))
            connection.close()
        self._out.close()
        error = ActorDead(f"{self._hub.name} has stopped")
        self.refusal.note(error)
        self._hub.lost(self, self.session.end(self._new_life()), error)
        self._hub.ended(self, error)
