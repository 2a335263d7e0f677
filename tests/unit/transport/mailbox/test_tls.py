"""TLS on real sockets: who gets a link, who does not, and that both ends are told."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.certificates import Authority, careless
from tests.helpers.nodes import KEY, Host, Town, stopping
from tests.simulation.loop import run_virtual

from ratchet.errors import AuthFailed, ConfigError
from ratchet.messages import AbortLoad, BurnVersion, PromptsClaimed, VersionBurnt
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.credentials import Credentials
from ratchet.transport.mailbox.hello import Refused
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.tls import Guest, TlsEnd
from ratchet.transport.mailbox.wire import SocketWire
from ratchet.types import Assignment, Prompt

ANYWHERE = Address.parse("tcp:127.0.0.1:0")
PLAIN = SocketWire()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="module")
def wire(authority: Authority) -> SocketWire:
    return SocketWire(Credentials(KEY, authority.credentials().tls))


def over_tcp(scene: Callable[[Town], Coroutine[Any, Any, None]], **limits: Any) -> None:
    async def play() -> None:
        problems: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: problems.append(what))
        async with (
            asyncio.timeout(30),
            stopping(Town(lambda name: ANYWHERE, Limits(**limits))) as t,
        ):
            await scene(t)
        assert not problems

    asyncio.run(play())


def ask(host: Host, name: str, number: int = 1) -> Any:
    return host.node.ref(name).ask(BurnVersion(0, number, ""), block=False, timeout=20.0)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - of what has no event, such as a log
        await asyncio.sleep(0.001)


# --- links


def test_messages_of_every_size_travel_both_ways(wire: SocketWire) -> None:
    def bulk(number: int) -> PromptsClaimed:
        text = "x" * (3_000_000 if number % 10 == 0 else number)
        return PromptsClaimed("i", (Assignment(number, 0, 0, Prompt("p", text), 1, 1.0),))

    async def scene(town: Town) -> None:
        a, b = await town.start("a", wire=wire), await town.start("b", wire=wire)
        for i in range(50):
            a.node.ref("b").tell(bulk(i))
            b.node.ref("a").tell(bulk(i))
        for host in (a, b):
            assert await host.inbox.has(50) == [bulk(i) for i in range(50)]
            assert not host.letters.all

    over_tcp(scene)


def test_nothing_that_is_sent_can_be_read_on_the_way(wire: SocketWire) -> None:
    secret = "the words of a prompt " * 100

    async def scene(town: Town) -> None:
        a, b = await town.start("a", wire=wire), await town.start("b", wire=wire)
        seen = bytearray()
        async with between(b, lambda data: seen.extend(data) or data) as address:
            a.node._locate = lambda name: address
            a.node.ref("b").tell(AbortLoad(0, 1, secret))
            assert await b.inbox.has(1) == [AbortLoad(0, 1, secret)]
            await a.node.stop(1.0)
        assert len(seen) > len(secret)
        assert b"words of a prompt" not in seen
        assert b"a/1" not in seen  # not even who is there

    over_tcp(scene)


def test_a_hello_that_was_changed_on_the_way_is_refused(wire: SocketWire) -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a", wire=wire), await town.start("b", wire=wire)
        chunks = itertools.count()

        def spoil(data: bytes) -> bytes:
            """Leave the handshake alone: to b, to a, to b with the hello of a."""
            return data if next(chunks) < 3 else data[:-1] + bytes([data[-1] ^ 1])

        async with between(b, spoil) as address:
            a.node._locate = lambda name: address
            with pytest.raises(AuthFailed, match="the TLS handshake failed: decryption failed or"):
                await ask(a, "b")
            await a.node.stop(1.0)
        assert not b.inbox.told

    over_tcp(scene)


@contextlib.asynccontextmanager
async def between(host: Host, change: Callable[[bytes], bytes]) -> AsyncIterator[Address]:
    """Yield an address where somebody sits who passes everything on, both ways, as it likes."""
    over = asyncio.Event()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(change(data))
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = host.node.address
        assert address is not None
        far_reader, far_writer = await asyncio.open_connection(address.host, address.port)
        try:
            await asyncio.gather(pass_on(reader, far_writer), pass_on(far_reader, writer))
        finally:  # the test may end first, and cancels this
            for end in (writer, far_writer):
                end.transport.abort()
        over.set()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield Address("tcp", "127.0.0.1", server.sockets[0].getsockname()[1])
        await over.wait()


def test_a_stop_delivers_what_was_told(wire: SocketWire) -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a", wire=wire), await town.start("b", wire=wire)
        b.node.ref("a").watch(b.inbox)
        for i in range(2000):
            a.node.ref("b").tell(AbortLoad(0, i, "x" * 1000))
        await a.node.stop(20.0)
        told = await b.inbox.has(2001)
        assert [message.version for message in told[:2000]] == list(range(2000))
        assert told[2000].reason == "a has stopped: a stops"

    over_tcp(scene)


def test_a_death_is_told_at_once(wire: SocketWire) -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a", wire=wire), await town.start("b", wire=wire)
        b.inbox.answer = lambda message: VersionBurnt(message.version)
        a.node.ref("b").watch(a.inbox)
        await ask(a, "b")
        loop = asyncio.get_running_loop()
        begin = loop.time()
        b.kill()
        [down] = await a.inbox.has(1)
        assert down.reason == "the process of b has ended"
        assert loop.time() - begin < 1.0

    over_tcp(scene)


def test_a_socket_that_is_full_pauses_the_sender(wire: SocketWire) -> None:
    """What waits in the process in front of a control message stays small under TLS too."""

    async def scene(town: Town) -> None:
        a, b = await town.start("a", wire=wire), await town.start("b", wire=wire)
        b.inbox.answer = lambda message: VersionBurnt(message.version)
        await ask(a, "b")
        mine, theirs = (x.node._peers[y]._out.connection for x, y in ((a, "b"), (b, "a")))
        assert mine is not None
        assert theirs is not None
        assert mine._transport is not None
        theirs._transport._socket.pause_reading()  # type: ignore[union-attr]
        prompt = Prompt("p", "x" * 12_000_000)
        a.node.ref("b").tell(PromptsClaimed("i", (Assignment(0, 0, 0, prompt, 1, 1.0),)))
        await until(lambda: mine.paused)
        await asyncio.sleep(0.05)
        assert mine.paused
        assert mine._transport.get_write_buffer_size() < 2 << 20
        theirs._transport._socket.resume_reading()  # type: ignore[union-attr]
        await b.inbox.has(2)
        assert not mine.paused

    over_tcp(scene)


# --- who is not let in


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


# --- what strangers can do


def test_a_stranger_that_does_not_finish_its_handshake_is_shown_out(wire: SocketWire) -> None:
    async def scene(town: Town) -> None:
        a = await town.start("a", wire=wire)
        assert a.node.address is not None
        loop = asyncio.get_running_loop()
        begin = loop.time()
        silent = await asyncio.open_connection(a.node.address.host, a.node.address.port)
        begun = await asyncio.open_connection(a.node.address.host, a.node.address.port)
        begun[1].write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        for reader, writer in (silent, begun):
            assert await reader.read() == b""
            assert 0.45 < loop.time() - begin < 3.0
            writer.close()
        await until(lambda: not a.node._connections)
        assert a.node.num_refused == 2

    over_tcp(scene, hello_s=0.5)


def test_handshakes_count_as_connections_and_make_room_for_nodes(wire: SocketWire) -> None:
    async def scene(town: Town) -> None:
        a = await town.start("a", wire=wire)
        assert a.node.address is not None
        strangers = [
            await asyncio.open_connection(a.node.address.host, a.node.address.port)
            for _ in range(8)
        ]
        await until(lambda: a.node.num_refused == 4)
        assert len(a.node._connections) == 4
        for name in ("b", "c"):
            b = await town.start(name, wire=wire)
            b.node.ref("a").tell(AbortLoad(0, 1, ""))
        await a.inbox.has(2)
        assert len(a.node._connections) == 4
        for _, writer in strangers:
            writer.transport.abort()

    over_tcp(scene, connections=4, hello_s=20.0)


def test_random_bytes_at_a_tls_door_change_nothing(wire: SocketWire) -> None:
    rng = random.Random(0)

    async def strange(address: Address) -> None:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        hello = bytearray(rng.randbytes(rng.randrange(1, 3000)))
        if rng.random() < 0.8:
            hello[:5] = b"\x16\x03\x01" + max(1, len(hello) - 5).to_bytes(2, "big")
        writer.write(hello)
        with contextlib.suppress(ConnectionError):
            writer.write_eof()
            await reader.read()
        writer.transport.abort()

    async def scene(town: Town) -> None:
        a, b = await town.start("a", wire=wire), await town.start("b", wire=wire)
        assert a.node.address is not None
        for _ in range(20):
            await asyncio.gather(*(strange(a.node.address) for _ in range(20)))
        a.inbox.answer = lambda message: VersionBurnt(message.version)
        assert await ask(b, "a", 7) == VersionBurnt(7)
        assert [link.peer for link in a.node.links()] == ["b"]
        assert a.node.num_refused > 200
        assert len(a.log.named("auth_failed")) == 1  # one machine, one line
        await until(lambda: len(a.node._connections) == 1)

    over_tcp(scene)


def test_bytes_changed_on_the_way_are_a_cut_and_not_a_message(wire: SocketWire) -> None:
    """Someone in between can end a connection. The session goes on over the next."""

    async def scene(town: Town) -> None:
        a, b = await town.start("a", wire=wire), await town.start("b", wire=wire)
        a.node.ref("b").tell(AbortLoad(0, 0, ""))
        await b.inbox.has(1)
        for i in range(1, 6):
            connection = a.node._peers["b"]._out.connection
            assert connection is not None
            assert connection._transport is not None
            a.node.ref("b").tell(AbortLoad(0, i, "x" * 100))
            forged = b"\x17\x03\x03\x00\x20" + bytes(32)
            connection._transport._socket.write(forged)  # type: ignore[attr-defined]
            a.node.ref("b").tell(AbortLoad(0, 100 + i, ""))
            await b.inbox.has(1 + 2 * i)
        assert [m.version for m in b.inbox.told] == [
            0,
            *(n for i in range(1, 6) for n in (i, 100 + i)),
        ]
        assert len(b.log.named("link_cut")) == 5
        assert not b.log.named("auth_failed")
        assert not a.letters.all

    over_tcp(scene)


# --- doors


@pytest.fixture
def outside() -> str:
    """An address of this machine that others could reach; nothing is sent there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but the loopback one")
        host = str(probe.getsockname()[0])
    return host


def test_no_door_to_the_network_without_credentials(outside: str, wire: SocketWire) -> None:
    async def scene(town: Town) -> None:
        there = Address("tcp", outside)
        open_door = town.build("a", address=there, wire=PLAIN)
        with pytest.raises(
            ConfigError, match=r"nothing keeps strangers out: give runtime\.token_f"
        ):
            await open_door.node.start()
        assert open_door.node._listener is None
        for name, credentials in (("a", Credentials(KEY)), ("b", Credentials(KEY))):
            await town.start(name, address=there, wire=SocketWire(credentials))
        town.hosts["a"].node.ref("b").tell(AbortLoad(0, 1, ""))
        await town.hosts["b"].inbox.has(1)
        await town.start("c", address=there, wire=wire)

    over_tcp(scene)


def test_a_door_has_an_ip_address(wire: SocketWire) -> None:
    async def scene(town: Town) -> None:
        a = town.build("a", address=Address.parse("tcp:node-7:1"), wire=wire)
        with pytest.raises(ConfigError, match="'node-7' is a name, for others to dial; to listen"):
            await a.node.start()
        b = town.build("b", address=Address.parse("tcp:192.0.2.1:0"), wire=wire)
        with pytest.raises(ConfigError, match=r"tcp:192\.0\.2\.1:0 cannot be bound"):
            await b.node.start()

    over_tcp(scene)


def test_unix_sockets_have_no_tls(wire: SocketWire, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)

    async def scene(town: Town) -> None:
        a = await town.start("a", address=Address.parse(f"unix:{tmp_path}/a"), wire=wire)
        b = await town.start("b", address=Address.parse(f"unix:{tmp_path}/b"), wire=PLAIN)
        b.node.ref("a").tell(AbortLoad(0, 1, ""))
        await a.inbox.has(1)

    over_tcp(scene)
