"""TLS between a socket and a connection, with a verdict that both ends get to hear.

Consumes what the socket brings, produces plain bytes for a `Guest`, and the other way round. Waits
for the handshake; the guest's own time-out for its hello unblocks it, since the guest is told of
the socket at once and only its bytes are held back. So it is counted and timed from the start.

Why not the TLS of asyncio: as of Python 3.11 a handshake that fails closes the socket before the
alert is sent, so that the other end sees a cut, and would dial again for ever; and the listening
end is told of neither the socket nor the failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import Any, Final, cast

from ratchet.transport.mailbox.credentials import explain
from ratchet.transport.mailbox.hello import Refused

_SHAKE_BYTES: Final = 16 << 10
_READ_BYTES: Final = 256 << 10
_LINGER_S: Final = 1.0
"""how long a refused peer has to read why"""
_TLS_BEGINS: Final = frozenset({0x15, 0x16})
"""alert and handshake: how a TLS peer can begin; a hello of ours begins with a zero"""
_NOT_BOTH: Final = (
    "one end speaks TLS and the other does not: give every node of the run the same runtime.tls"
)


def begins_like_tls(data: bytes | bytearray | memoryview) -> bool:
    """Tell a peer that speaks TLS by its first byte."""
    return len(data) > 0 and data[0] in _TLS_BEGINS


def not_both_tls() -> Refused:
    """Return what either end has to say to a peer that does it the other way."""
    return Refused("tls", _NOT_BOTH)


class Guest(asyncio.BufferedProtocol):
    """A protocol that can be told why it will not have a link."""

    def get_buffer(self, sizehint: int) -> memoryview:
        """Lend the room for the next bytes."""
        raise NotImplementedError

    def refuse(self, refusal: Refused) -> None:
        """End; tell the peer why, unless it knows."""
        raise NotImplementedError


class TlsEnd(asyncio.BufferedProtocol, asyncio.Transport):
    """One end: the socket's protocol, and the guest's transport."""

    def __init__(self, guest: Guest, context: ssl.SSLContext, *, server_side: bool) -> None:
        super().__init__()
        self._guest = guest
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        # typeshed does not know that with a buffer it is the count that is returned
        self._read_into = cast("Callable[[int, memoryview], int]", self._tls.read)
        self._room = memoryview(bytearray(_SHAKE_BYTES))
        self._begun = False
        self._held: list[bytes] | None = []
        """what the guest wrote before the handshake was over; None from then on"""
        self._trusted = False
        """the peer has sent something: it has taken our certificate"""
        self._refused = False
        self._timer: asyncio.TimerHandle | None = None
        self._plain = False
        """the peer does not speak TLS, and is told so in plain"""
        self._socket: asyncio.Transport
        """there from `connection_made` on"""

    # --- the socket's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - what asyncio promises
        self._socket = transport
        self._guest.connection_made(self)
        if not transport.is_closing():
            self._shake()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Lend asyncio the room for the next bytes."""
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        """Go on with the handshake, or pass on what was decrypted."""
        if self._refused or self.is_closing():
            return
        if not self._begun:
            self._begun = True
            self._plain = not begins_like_tls(self._room)
        if self._plain:
            self._refuse(not_both_tls())
            return
        self._incoming.write(self._room[:nbytes])
        try:
            if self._held is None or self._shake():
                self._read()
        except ssl.SSLError as error:
            self._flush()  # the alert
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the guest."""
        if self._timer is not None:
            self._timer.cancel()
        self._guest.connection_lost(exc)

    def pause_writing(self) -> None:
        """Tell the guest."""
        self._guest.pause_writing()

    def resume_writing(self) -> None:
        """Tell the guest."""
        self._guest.resume_writing()

    # --- the guest's side

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and send; before the handshake is over, keep."""
        if self._plain:
            self._socket.write(data)
        elif self._refused or self.is_closing():
            return  # the alert was the last word
        elif self._held is not None:
            self._held.append(bytes(data))
        else:
            self._encrypt(data)
            self._flush()

    def close(self) -> None:
        """Send what is written, take leave, close."""
        if self._refused:
            self._linger()
            return
        if self._held is None and not self.is_closing():
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()
            self._flush()
        self._socket.close()

    def abort(self) -> None:
        """Close at once."""
        self._socket.abort()

    def is_closing(self) -> bool:
        """The socket takes nothing more."""
        return self._socket.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return what the socket has to tell."""
        return self._socket.get_extra_info(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Limit what waits for the socket."""
        self._socket.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        """Bytes that wait for the socket."""
        return self._socket.get_write_buffer_size()

    # --- between the two

    def _shake(self) -> bool:
        """Go on with the handshake; True once it is over."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        held, self._held = self._held or [], None
        self._room = memoryview(bytearray(_READ_BYTES))
        for data in held:
            self._encrypt(data)
        self._flush()
        return True

    def _encrypt(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data)
        while rest:  # one record at a time
            rest = rest[self._tls.write(rest) :]

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._socket.write(self._outgoing.read())

    def _read(self) -> None:
        """Fill the guest's room as often as there is something to fill it with."""
        while not self.is_closing():
            room = self._guest.get_buffer(-1)
            filled = self._fill(room)
            if filled:
                self._trusted = True
                self._guest.buffer_updated(filled)
            if filled < len(room):
                return

    def _fill(self, room: memoryview) -> int:
        filled = 0
        while filled < len(room):
            try:
                count = self._read_into(len(room) - filled, room[filled:])
            except ssl.SSLWantReadError:
                self._flush()
                break
            if count == 0:  # the peer takes leave
                self._socket.close()
                break
            filled += count
        return filled

    # --- failures

    def _fail(self, error: ssl.SSLError) -> None:
        if self._trusted:
            self._socket.abort()  # a cut: whoever holds the link dials again
        elif isinstance(error, ssl.SSLCertVerificationError):
            text = f"the certificate of the other end is refused: {explain(error)}"
            self._refuse(Refused("tls", text))
        elif "ALERT" in (error.reason or ""):
            text = f"the other end refuses this one: {explain(error)}"
            self._refuse(Refused("tls", text, by_peer=True))
        else:
            self._refuse(Refused("tls", f"the TLS handshake failed: {explain(error)}"))

    def _refuse(self, refusal: Refused) -> None:
        self._refused = True
        self._guest.refuse(refusal)

    def _linger(self) -> None:
        """Close for writing, and leave the socket to the peer for a moment: closed at once, with
        something unread, it would take the alert back.
        """
        if not self.is_closing() and self._socket.can_write_eof():
            self._socket.write_eof()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_LINGER_S, self._socket.abort)
