"""Who gets no link over TLS, whoever dials, and that both ends are told why."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.certificates import Authority, careless
from tests.helpers.tcp_towns import PLAIN, ask, over_tcp, until
from tests.simulation.loop import run_virtual

from ratchet.errors import AuthFailed
from ratchet.transport.mailbox.hello import Refused
from ratchet.transport.mailbox.tls import Guest, TlsEnd
from ratchet.transport.mailbox.wire import SocketWire

if TYPE_CHECKING:
    from tests.helpers.nodes import Host, Town


def foreign(authority: Authority, stranger: Authority) -> dict[str, tuple[SocketWire, str, str]]:
    """Who a node of the run can meet, and what is said of it: by who dials it, and by who is
    dialled by it.
    """
    ours, theirs = authority.sign(), stranger.sign()
    expired = authority.sign(expired=True)
    no_signature = "is refused: self-signed certificate in certificate chain"
    plain = "one end speaks TLS and the other does not: give every node of the run the same"
    return {
        "of another authority": (
            SocketWire(careless(trusts=theirs, shows=theirs)),
            no_signature,
            no_signature,
        ),
        "of another authority, trusting ours": (
            SocketWire(careless(trusts=ours, shows=theirs)),
            "is refused: unable to get local issuer certificate",
            "other end refuses this one: tlsv1 alert unknown ca",
        ),
        "expired": (
            SocketWire(careless(trusts=ours, shows=expired)),
            "is refused: certificate has expired",
            "other end refuses this one: sslv3 alert certificate expired",
        ),
        "without": (
            SocketWire(careless(trusts=ours, shows=None)),
            "other end refuses this one: tlsv1 alert protocol version",
            "other end refuses this one: tlsv13 alert certificate required",
        ),
        "plain": (PLAIN, plain, plain),
    }


KINDS = [
    "of another authority",
    "of another authority, trusting ours",
    "expired",
    "without",
    "plain",
]


async def expect_refusal(dialler: Host, listener: Host, says: str) -> None:
    dialler.node.ref(listener.node.name).watch(dialler.inbox)
    for _ in range(3):
        with pytest.raises(AuthFailed) as caught:
            await ask(dialler, listener.node.name)
        assert says in str(caught.value)
    await until(lambda: bool(listener.log.named("auth_failed")))
    await asyncio.sleep(0.2)  # would dial again
    [refused] = dialler.log.named("link_refused")
    assert says in refused["error"]
    [failed] = listener.log.named("auth_failed")
    assert failed["at"].startswith("127.0.0.1:")
    assert listener.node.num_refused == 1
    assert not listener.inbox.told
    assert len(dialler.inbox.told) == 1  # the Down
    await until(lambda: not listener.node._connections and not dialler.node._connections)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stranger_that_dials_is_refused_and_both_ends_say_so(
    kind: str, wire: SocketWire, authority: Authority, stranger: Authority
) -> None:
    foreign_wire, _, says = foreign(authority, stranger)[kind]

    async def scene(town: Town) -> None:
        a, b = await town.start("a", wire=foreign_wire), await town.start("b", wire=wire)
        await expect_refusal(a, b, says)

    over_tcp(scene)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stranger_that_is_dialled_is_refused_and_both_ends_say_so(
    kind: str, wire: SocketWire, authority: Authority, stranger: Authority
) -> None:
    foreign_wire, says, _ = foreign(authority, stranger)[kind]

    async def scene(town: Town) -> None:
        a, b = await town.start("a", wire=wire), await town.start("b", wire=foreign_wire)
        await expect_refusal(a, b, says)

    over_tcp(scene)


def test_a_right_certificate_does_not_stand_for_a_wrong_token(wire: SocketWire) -> None:
    async def scene(town: Town) -> None:
        a = await town.start("a", wire=wire)
        b = await town.start("b", wire=wire, key=bytes(32))
        await expect_refusal(a, b, "a and b do not hold the same key")

    over_tcp(scene)


class Socket(asyncio.Transport):
    """One that nothing leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.did: list[str] = []

    def is_closing(self) -> bool:
        return "close" in self.did or "abort" in self.did

    def write(self, data: Any) -> None:
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.did.append("eof")

    def close(self) -> None:
        self.did.append("close")

    def abort(self) -> None:
        self.did.append("abort")


class Refusing(Guest):
    """What a connection does with a refusal."""

    transport: asyncio.Transport
    refusal: Refused | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def refuse(self, refusal: Refused) -> None:
        self.refusal = refusal
        self.transport.write(b"a word in plain")
        self.transport.close()


def test_a_refused_peer_has_a_moment_to_read_why(authority: Authority) -> None:
    """A socket closed with something unread in it is reset, and the alert with it. What the peer
    sent before it knew is not read either.
    """
    stranger = careless(trusts=authority.sign(), shows=None).tls
    node = authority.credentials().tls
    assert stranger is not None
    assert node is not None

    async def scene() -> None:
        to_node, to_stranger = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = stranger.client.wrap_bio(to_stranger, to_node)
        guest, sock = Refusing(), Socket()
        end = TlsEnd(guest, node.server, server_side=True)
        end.connection_made(sock)

        def arrive(data: bytes) -> None:
            end.get_buffer(-1)[: len(data)] = data
            end.buffer_updated(len(data))

        with pytest.raises(ssl.SSLWantReadError):
            client.do_handshake()
        arrive(to_node.read())
        to_stranger.write(bytes(sock.written))
        client.do_handshake()  # as far as the stranger knows, all is well
        sock.written.clear()
        arrive(to_node.read())
        assert guest.refusal is not None
        assert guest.refusal.kind == "tls"
        assert sock.did == ["eof"]
        client.write(b"what was on its way")
        arrive(to_node.read())
        await asyncio.sleep(0.99)
        assert sock.did == ["eof"]
        to_stranger.write(bytes(sock.written))
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
            client.read()
        await asyncio.sleep(0.02)
        assert sock.did == ["eof", "abort"]

    run_virtual(scene())
