"""One socket: bytes to frames, through the hello, and on to the peer that it belongs to.

Consumes bytes from an asyncio transport, produces frames for a `Peer`. Waits for the hello, for at
most `hello_s`; a full socket pauses writing and the transport unblocks it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Final, Protocol

from ratchet.errors import ProtocolError
from ratchet.transport.mailbox.codec import pack, unpack_hello, unpack_link
from ratchet.transport.mailbox.frames import LinkFrame, Reject
from ratchet.transport.mailbox.hello import Handshake, Refused
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.peer_files import PeerFiles, Unreadable
from ratchet.transport.mailbox.reader import FrameReader
from ratchet.transport.mailbox.tls import Guest, begins_like_tls, not_both_tls

_READ_BYTES = 512 << 10
_REASON_CHARACTERS = 1000  # a reason fits into a frame of a hello
_WRITE_BYTES = 256 << 10  # what may wait in this process in front of a control message
_SOCKET_BYTES: Final = 256 << 10
"""What may wait in the kernel in front of it, where the kernel can be told."""


class Link(Protocol):
    """What a connection serves once it is open."""

    def on_frame(self, connection: Connection, frame: LinkFrame, num_bytes: int) -> None:
        """A frame has arrived."""
        ...

    def on_room(self) -> None:
        """The socket takes bytes again."""
        ...

    def on_broken(self, connection: Connection, error: ProtocolError) -> None:
        """The peer broke the protocol."""
        ...

    def on_unreadable(self, connection: Connection, error: Unreadable) -> None:
        """Arrays that the peer shares are out of reach."""
        ...

    def on_cut(self, connection: Connection) -> None:
        """The connection is gone."""
        ...


class Host(Protocol):
    """What a connection needs of its node."""

    def on_made(self, connection: Connection) -> None:
        """The connection is there; its hello begins."""
        ...

    def on_hello_done(self, connection: Connection) -> Link | None:
        """Return the peer that takes the connection, or None if there is a better one."""
        ...

    def on_hello_failed(self, connection: Connection, error: Exception) -> None:
        """The hello ended without a link."""
        ...

    def on_closed(self, connection: Connection) -> None:
        """The connection is gone."""
        ...


class Connection(Guest):
    """A connection of either end, from its first byte to its last."""

    def __init__(self, host: Host, handshake: Handshake, limits: Limits) -> None:
        self.handshake = handshake
        self._host = host
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(limits.hello_bytes)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._link: Link | None = None
        self.opened: asyncio.Future[None] = self._loop.create_future()
        """ends when the hello is over; an error says why there is no link"""
        self.opened.add_done_callback(_retrieve)
        self.made_at = 0.0
        """when it was there, before its hello, on the loop's clock"""
        self.remote = ""
        """where the other end is, for people to read"""
        self.paused = False
        self.closed = False

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the hello."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - what asyncio promises
        self._transport = transport
        self.made_at = self._loop.time()
        self.remote = _readable(transport.get_extra_info("peername"))
        transport.set_write_buffer_limits(high=_WRITE_BYTES)
        _bound_buffers(transport)
        files = PeerFiles.behind(transport.get_extra_info("socket"))
        if files is not None:
            self.handshake.on_this_host(files)
        self._timer = self._loop.call_later(self._limits.hello_s, self._on_late)
        self._host.on_made(self)
        first = self.handshake.first()
        if first is not None:
            self.write(first)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Lend asyncio the room for the next bytes."""
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Handle every frame that is complete."""
        try:
            for view in self._reader.written(nbytes):
                if self.closed:
                    return
                if self._link is not None:
                    self._link.on_frame(self, unpack_link(view), len(view))
                else:
                    self._on_hello(view)
        except Refused as refusal:
            self.refuse(refusal)
        except Unreadable as error:
            assert self._link is not None  # noqa: S101 - before there is a link nothing is shared
            self._link.on_unreadable(self, error)
        except ProtocolError as error:
            if self._link is not None:
                self._link.on_broken(self, error)
            elif begins_like_tls(self._reader.unread):
                self.refuse(not_both_tls())
            else:
                self._give_up(error)

    def pause_writing(self) -> None:
        """Stop: the socket is full."""
        self.paused = True

    def resume_writing(self) -> None:
        """Go on writing."""
        self.paused = False
        if self._link is not None:
            self._link.on_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever the connection belongs to."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        if not self.opened.done():
            self.opened.set_exception(exc or ConnectionResetError("closed during the hello"))
        self._host.on_closed(self)
        if self._link is not None:
            self._link.on_cut(self)

    # --- our side

    def write(self, data: bytes | bytearray) -> None:
        """Write a frame; `data` must not be changed afterwards."""
        if self._transport is not None and not self.closed:
            self._transport.write(data)

    def close(self) -> None:
        """Write what is buffered, then close."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once; nothing that arrives from now on counts."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def refuse(self, refusal: Refused) -> None:
        """End the hello; tell the peer why, unless it is the peer that refuses."""
        self._host.on_hello_failed(self, refusal)
        if not refusal.by_peer:
            self.write(pack(Reject(refusal.kind, str(refusal)[:_REASON_CHARACTERS])))
        self._finish(refusal)

    def _on_hello(self, view: memoryview) -> None:
        reply = self.handshake.receive(unpack_hello(view))
        if reply is not None:
            self.write(reply)
        if self.handshake.done:
            self._open()

    def _open(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._reader.widen(self._limits.frame_bytes, _READ_BYTES)
        self._link = self._host.on_hello_done(self)
        if self._link is None:
            self._give_up(ProtocolError("another connection to the same peer is kept"))
        elif not self.opened.done():
            self.opened.set_result(None)

    def _on_late(self) -> None:
        self._give_up(TimeoutError(f"the hello took longer than {self._limits.hello_s:g} s"))

    def _give_up(self, error: Exception) -> None:
        self._host.on_hello_failed(self, error)
        self._finish(error)

    def _finish(self, error: Exception) -> None:
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        if not self.opened.done():
            self.opened.set_exception(error)
        self.close()


def _retrieve(future: asyncio.Future[None]) -> None:
    """Mark the error as seen: the listening end has nobody who awaits it."""
    if not future.cancelled():
        future.exception()


def _readable(peername: object) -> str:
    """Return "HOST:PORT"; the ends of a Unix socket have no name."""
    return f"{peername[0]}:{peername[1]}" if isinstance(peername, tuple) else "a Unix socket"


def _bound_buffers(transport: asyncio.Transport) -> None:
    """Keep the kernel from holding megabytes of bulk in front of a control message: of what TCP has
    not sent yet, and, on the loopback interface, where it gains nothing, of anything. A Unix socket
    holds less than is wanted: two groups of 100 KB, and then each waits for the reader.
    """
    found = transport.get_extra_info("socket")
    if found is None:
        return
    if found.family == socket.AF_UNIX:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        return
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _SOCKET_BYTES)
    peer = transport.get_extra_info("peername")
    if peer is not None and ipaddress.ip_address(peer[0]).is_loopback:  # None: it is gone already
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
