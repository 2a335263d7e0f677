"""The endpoint of one process: its door for others, its links to them, and refs by name.

Consumes connections and messages; produces refs. `start` binds the door; a link is opened by
whoever needs it first and serves both directions. `stop` waits for what is queued, for as long as
it is told to.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from ratchet.errors import ActorDead, ConfigError, RatchetError
from ratchet.status import LinkRow
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.base import DeadLetters, Ref, Wait
from ratchet.transport.mailbox.calls import Calls
from ratchet.transport.mailbox.connection import Connection, Link
from ratchet.transport.mailbox.connections import Connections
from ratchet.transport.mailbox.copies import Copies
from ratchet.transport.mailbox.dispatch import Dispatcher
from ratchet.transport.mailbox.flight import Item
from ratchet.transport.mailbox.frames import Envelope, Hello
from ratchet.transport.mailbox.hello import NONCE_BYTES, Handshake, Identity, Refused
from ratchet.transport.mailbox.hub import Log
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.peer import Peer
from ratchet.transport.mailbox.peers import Peers
from ratchet.transport.mailbox.refs import HomeRef, Refs, RemoteRef
from ratchet.transport.mailbox.session import Session
from ratchet.transport.mailbox.shared import File, Loan, make_probe
from ratchet.transport.mailbox.wire import Listener, SocketWire, Wire

_MIN_KEY_BYTES: Final = 16


class Node:
    """Implements `Directory`.

    Args:
        name: of this node, and of the actor that this process hosts.
        incarnation: differs each time the process starts.
        address: where to listen; None for a visitor, who dials and cannot be dialled.
        key: secret of the run, at least 16 bytes; every node of a run has the same.
        run_id: nodes of different runs do not talk to each other. A visitor may leave it empty.
        local: finds an actor of this process by name.
        locate: tells where the node that hosts an actor listens; asked before each dial. A
            `LookupError` or `OSError` means: not yet; it is asked again.
        is_newest: tells what the registry says of a life of a name (`AddressBook.is_newest`).
        dead_letters: takes what cannot be delivered.
        new_id: makes unique texts.
        random_bytes: makes unpredictable bytes.
        log: structured logger.
        limits: sizes and times; the same on every node.
        wire: the sockets; give a `SocketWire` its credentials to leave this machine.
    """

    def __init__(  # noqa: PLR0913 - everything from outside is injected, by keyword
        self,
        *,
        name: str,
        incarnation: str,
        address: Address | None,
        key: bytes,
        run_id: str,
        local: Callable[[str], Ref | None],
        locate: Callable[[str], Address],
        is_newest: Callable[[str, str], bool | None] = lambda _name, _incarnation: None,
        dead_letters: DeadLetters,
        new_id: Callable[[], str],
        random_bytes: Callable[[int], bytes],
        log: Log,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        wire: Wire | None = None,
    ) -> None:
        if len(key) < _MIN_KEY_BYTES:
            msg = (
                f"the link key of {name} has {len(key)} bytes and needs {_MIN_KEY_BYTES}: "
                "give every process of the run the same random key"
            )
            raise ConfigError(msg)
        self.name = name
        self.address = address
        """where it listens; the real port once it has started"""
        self.log = log
        self._me = Identity(name, incarnation, run_id, key)
        self._local = local
        self._locate = locate
        self.is_newest = is_newest
        self._new_id = new_id
        self._random_bytes = random_bytes
        self._limits = limits
        self._wire = wire or SocketWire()
        self._calls = Calls(name)
        self._dispatcher = Dispatcher(
            name=name,
            local=local,
            calls=self._calls,
            dead_letters=dead_letters,
            limits=limits,
        )
        self._peers = Peers(self._new_peer)
        self._refs = Refs()
        self._listener: Listener | None = None
        self._probe: File | None = None
        self._copies = Copies()
        self._connections = Connections(name, limits.connections, log)
        self._progress = asyncio.Event()
        """set whenever `stop` may have one thing less to wait for"""
        self._ticker: asyncio.TimerHandle | None = None
        self._stopping = False
        self._closed = False

    # --- for the process

    async def start(self) -> None:
        """Open the door.

        Raises:
            ConfigError: the address is taken, is not this machine's, or is not safe.
        """
        self._probe = make_probe()
        if self.address is not None:
            self._listener = await self._wire.listen(self.address, self._accept)
            self.address = self._listener.address
        self._tick()
        self.log.info("node_started", node=self.name, address=str(self.address))

    def ref(self, name: str) -> Ref:
        """Return a ref; the actor may not be up yet, and the ref stays right when it restarts."""
        if name not in self._refs:
            if name == self.name or self._local(name) is not None:
                self._refs[name] = HomeRef(name, self._local, self._dispatcher)
            else:
                remote = RemoteRef(self.name, self._peers[name], self._calls, self._dispatcher)
                self._refs[name] = remote
        return self._refs[name]

    def links(self) -> tuple[LinkRow, ...]:
        """Return every link as it is now, as others may read it."""
        return self._peers.links()

    def waits(self) -> tuple[Wait, ...]:
        """Return every open ask of this process: who waits, on whom, for what, until when."""
        return tuple(self._calls.waits())

    @property
    def num_refused(self) -> int:
        """Connections that were turned away, or did not get through their hello."""
        return self._connections.num_refused

    @property
    def num_late_replies(self) -> int:
        """Replies that came after their ask had ended, or twice."""
        return self._calls.num_late_replies

    async def stop(self, timeout_s: float) -> None:
        """Deliver what is queued for at most `timeout_s` seconds, tell the peers, close."""
        if self._stopping:
            return
        self._stopping = True
        deadline = asyncio.get_running_loop().time() + timeout_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while not all(peer.settled for peer in self._peers.values()):
                    self._progress.clear()
                    await self._progress.wait()
        self._closed = True
        if self._ticker is not None:
            self._ticker.cancel()
        self._dispatcher.close()
        for peer in tuple(self._peers.values()):
            await peer.close(f"{self.name} stops")
        if self._listener is not None:
            self._listener.close()
        for connection in self._connections:
            connection.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while self._connections:
                    self._progress.clear()
                    await self._progress.wait()
        for connection in self._connections:
            connection.abort()
        self._copies.close()
        self._probe = None
        self.log.info("node_stopped", node=self.name)

    # --- peers

    def _new_peer(self, name: str) -> Peer:
        peer = Peer(name, self, self._limits, self._new_id)
        if self._closed:
            peer.refusal.note(ActorDead(f"{self.name} has stopped"))
        return peer

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        for peer in tuple(self._peers.values()):
            peer.tick(loop.time())
        self._forget()
        self._ticker = loop.call_later(self._limits.heartbeat_s, self._tick)

    def _forget(self) -> None:
        """Drop the peers of which nothing is left but the name: visitors that have gone."""
        in_hello = self._connections.names_in_hello()

        def is_of_use(name: str) -> bool:
            return name in in_hello or self.where(name) is not None or self._refs.is_held(name)

        self._peers.forget(is_of_use)

    def where(self, name: str) -> Address | None:
        """Return the address to dial, or None if nobody knows it: `Hub`."""
        try:
            return self._locate(name)
        except (LookupError, OSError, RatchetError):
            return None

    async def dial(self, name: str) -> None:
        """Open a connection to the node of that name: `Hub`."""
        address = self._locate(name)
        connection = self._connection(wanted=name)
        try:
            await self._wire.dial(address, lambda: connection)
            await connection.opened
        except Refused as refusal:  # the connection closes once the peer has had time to hear why
            text = f"{self.name} has no link to {name} at {address}: {refusal}"
            raise Refused(refusal.kind, text, by_peer=refusal.by_peer) from None
        except BaseException:
            connection.abort()
            raise

    def copy(self, loan: Loan) -> asyncio.Future[bool]:
        """Fill a loan on another thread: `Hub`."""
        return self._copies.start(loan)

    def deliver(self, peer: Peer, envelopes: list[Envelope]) -> None:
        """Hand out what has arrived: `Hub`."""
        self._dispatcher.deliver(peer, envelopes)

    def lost(self, peer: Peer, items: list[Item], error: RatchetError) -> None:
        """Account for what was not delivered: `Hub`."""
        self._dispatcher.lost(peer, items, error)

    def ended(self, peer: Peer, error: RatchetError) -> None:
        """End what waits for a peer: `Hub`."""
        self._calls.end_all(peer.name, error)
        self._progress.set()

    def settled(self) -> None:
        """A peer has everything: `Hub`."""
        self._progress.set()

    # --- connections

    def _connection(self, *, wanted: str | None) -> Connection:
        nonce = self._random_bytes(NONCE_BYTES)
        probe = None if self._probe is None else self._probe.name
        handshake = Handshake(self._me, nonce, self._session_with, wanted=wanted, probe=probe)
        return Connection(self, handshake, self._limits)

    def _accept(self) -> Connection:
        return self._connection(wanted=None)

    def on_made(self, connection: Connection) -> None:
        """A connection is there: `Host`."""
        self._connections.add(connection)

    def _session_with(self, hello: Hello) -> Session:
        if self._closed or hello.name == self.name:
            raise Refused("name", f"{self.name} takes no link from {hello.name} now")
        peer = self._peers[hello.name]
        if not peer.lives.admits(hello.incarnation):
            raise Refused("replaced", f"a newer process has taken the name {hello.name}")
        return peer.session

    def on_hello_done(self, connection: Connection) -> Link | None:
        """Give the connection to its peer: `Host`."""
        hello = connection.handshake.peer
        if hello is None:
            return None
        peer = self._peers[hello.name]
        return peer if peer.take(connection) else None

    def on_hello_failed(self, connection: Connection, error: Exception) -> None:
        """Account for it: `Host`."""
        self._connections.failed(connection, error)

    def on_closed(self, connection: Connection) -> None:
        """Forget a connection: `Host`."""
        self._connections.discard(connection)
        self._progress.set()
