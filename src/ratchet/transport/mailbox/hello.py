"""The mutually authenticated hello that opens a link. Pure.

Consumes the frames of the peer, produces the frames to send, and at the end what both sides need
to resume their session. Each step waits for one frame of the peer; the connection's time-out
unblocks it when none comes.

Each end hears whether the other one can read files of its process (`Hello.probe`, `reads`).

    dialler                                   listener
    Hello(nonce) ───────────────────────────►
                 ◄─────────────────────────── Hello(nonce)
    Proof(mac, life) ───────────────────────►            the listener learns nothing, and
                 ◄─────────────────── Proof(mac, life, delivered)    creates nothing, before this
    Resume(delivered) ──────────────────────►
                 ◄─────────────────────────── Welcome

Each mac is HMAC-SHA256, under the key of the run, over a role, and both hellos whole: nonces,
names, incarnations, run id and protocol version. So a proof fits one end of one connection only.
The dialler sends nothing before it is welcome: until then the listener may have another life than
the one that it named, for example because it learned meanwhile that a former life of the dialler
has ended, and what was sent to the one would be lost with it.
A dialler that does not know the run yet says so with an empty run id, and learns it from the hello
that the listener proves.
The hello authenticates the link and encrypts nothing: between machines that is for the TLS below.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from ratchet.errors import ActorDead, AuthFailed, ProtocolError, RatchetError
from ratchet.transport.mailbox.codec import pack
from ratchet.transport.mailbox.frames import (
    PROTOCOL,
    Hello,
    HelloFrame,
    Proof,
    Reject,
    Resume,
    Welcome,
)
from ratchet.transport.mailbox.peer_files import PeerFiles
from ratchet.transport.mailbox.session import Session
from ratchet.transport.mailbox.shared import FileName

NONCE_BYTES: Final = 32
RejectKind = Literal["tls", "key", "run", "protocol", "name", "replaced", "busy"]
_AUTH_KINDS: Final = frozenset({"tls", "key", "run", "protocol"})


@dataclass(frozen=True)
class Identity:
    """Who a node is, and the secret that proves it."""

    name: str
    incarnation: str
    run_id: str
    key: bytes = field(repr=False)


class Refused(Exception):  # noqa: N818 - a verdict of the hello, caught within this package
    """One end will not open the link."""

    def __init__(self, kind: str, text: str, *, by_peer: bool = False) -> None:
        super().__init__(text)
        self.kind = kind
        self.by_peer = by_peer
        """the peer knows already"""

    @property
    def final(self) -> bool:
        """Dialling again would end in the same way."""
        return self.kind in _AUTH_KINDS or self.kind == "replaced"

    def as_error(self) -> RatchetError:
        """Return what the users of a link get to see."""
        if self.kind in _AUTH_KINDS:
            return AuthFailed(str(self))
        return ActorDead(str(self)) if self.kind == "replaced" else ProtocolError(str(self))


class Handshake:
    """One end of a hello. `wanted` is the name to reach, or None for the end that listens."""

    def __init__(
        self,
        me: Identity,
        nonce: bytes,
        session_with: Callable[[Hello], Session],
        *,
        wanted: str | None,
        probe: FileName | None = None,
    ) -> None:
        self._me = me
        self._session_with = session_with
        self._wanted = wanted
        self._hello = Hello(PROTOCOL, me.name, wanted or "", me.incarnation, me.run_id, nonce)
        self._probe = probe
        self._session: Session | None = None
        self._claimed = wanted or "?"
        self.life = ""
        """of this end, as the peer was told"""
        self.peer: Hello | None = None
        """who the peer says it is; proved once `done`"""
        self.peer_life = ""
        self.delivered = (0, 0)
        """what the peer has received of `life`"""
        self.done = False
        self._peer_files: PeerFiles | None = None
        self.readable: PeerFiles | None = None
        """files of the process at the other end, if they can be read here"""
        self.lends = False
        """the peer can read files of this process"""

    @property
    def claimed(self) -> str:
        """The name that the other end claims, for people to read."""
        return self._claimed[:100]

    @property
    def dials(self) -> bool:
        """This end dialled."""
        return self._wanted is not None

    def on_this_host(self, files: PeerFiles) -> None:
        """Try, before anything is sent, whether the ends can read `files` of each other."""
        self._peer_files = files
        self._hello = msgspec.structs.replace(self._hello, probe=self._probe)

    def first(self) -> bytearray | None:
        """Return what to send before anything is received."""
        return pack(self._hello) if self.dials else None

    def receive(self, frame: HelloFrame) -> bytearray | None:
        """Take the peer's frame, return ours.

        Raises:
            Refused: one of the two will not have the other.
            ProtocolError: the frame is out of turn.
        """
        if isinstance(frame, Reject):
            raise Refused(
                frame.kind, f"{self.claimed} refuses the link: {frame.text}", by_peer=True
            )
        if isinstance(frame, Hello) and self.peer is None:
            return self._on_hello(frame)
        if isinstance(frame, Proof) and self.peer is not None and not self.peer_life:
            return self._on_proof(frame, self.peer)
        if isinstance(frame, Resume) and self.peer_life and not self.dials:
            self.lends = frame.reads
            self._finish(frame.delivered)
            return pack(Welcome())
        if isinstance(frame, Welcome) and self.peer_life and self.dials:
            self._finish(self.delivered)
            return None
        raise ProtocolError(f"{type(frame).__name__} is out of turn in the hello")

    def _on_hello(self, hello: Hello) -> bytearray:
        self._claimed = hello.name
        self._check(hello)
        self.peer = hello
        if self.dials:
            self._session = self._session_dialled(hello)
            self.life = self._session.life
            return pack(Proof(self._mac("dialler"), self.life, (0, 0)))
        return pack(msgspec.structs.replace(self._hello, wanted=hello.name))

    def _session_dialled(self, hello: Hello) -> Session:
        """Who was replaced may still listen where its successor is looked for: that is no word on
        the successor, which is looked for again.
        """
        try:
            return self._session_with(hello)
        except Refused as error:
            if error.kind == "replaced":
                raise ProtocolError(f"an older process of {hello.name} is at its address") from None
            raise

    def _check(self, hello: Hello) -> None:
        me = self._me
        if hello.protocol != PROTOCOL:
            raise Refused(
                "protocol",
                f"{hello.name} speaks link protocol {hello.protocol} and {me.name} speaks "
                f"{PROTOCOL}: run the same version of ratchet on both ends",
            )
        learns = not (me.run_id if self.dials else hello.run_id)
        if hello.run_id != me.run_id and not learns:
            raise Refused(
                "run", f"{hello.name} is of run {hello.run_id!r} and {me.name} of {me.run_id!r}"
            )
        there = hello.name if self.dials else hello.wanted
        meant = self._wanted if self.dials else me.name
        if there != meant:
            raise Refused("name", f"{meant if self.dials else there} is not at this address")
        if len(hello.nonce) != NONCE_BYTES or not hello.name:
            raise ProtocolError("a hello without a name, or with a nonce of another size")

    def _mac(self, role: Literal["dialler", "listener"]) -> bytes:
        peer = self.peer
        assert peer is not None  # noqa: S101 - only called once the peer has said hello
        mine = msgspec.structs.replace(self._hello, wanted=self._wanted or peer.name)
        hellos = (mine, peer) if self.dials else (peer, mine)
        return hmac.digest(self._me.key, msgspec.msgpack.encode((role, *hellos)), "sha256")

    def _on_proof(self, proof: Proof, peer: Hello) -> bytearray:
        expected = self._mac("listener" if self.dials else "dialler")
        if not hmac.compare_digest(expected, proof.mac):
            raise Refused("key", f"{peer.name} and {self._me.name} do not hold the same key")
        if not proof.life:
            raise ProtocolError("a proof that names no life")
        if self._session is None:
            self._session = self._session_with(peer)
            self.life = self._session.life
        self.peer_life = proof.life
        self._try_files(peer, self._session)
        reads = self.readable is not None
        known = self._session.delivered_of(proof.life)
        if self.dials:
            self.delivered, self.lends = proof.delivered, proof.reads
            return pack(Resume(known, reads))
        return pack(Proof(self._mac("listener"), self.life, known, reads))

    def _try_files(self, peer: Hello, session: Session) -> None:
        """Only now that the peer has proved itself is anything opened that it names."""
        files, probe = self._peer_files, peer.probe
        if files is not None and probe is not None and session.may_read and files.can_read(probe):
            self.readable = files

    def _finish(self, delivered: tuple[int, int]) -> None:
        if self._session is None or self._session.life != self.life:
            raise ProtocolError("the session was given up during the hello")
        self.delivered = delivered
        self.done = True
