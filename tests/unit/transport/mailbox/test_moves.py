"""Roles that come back at another address, on real sockets, found by an address book."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from tests.helpers.nodes import Host, Town, stopping

from ratchet.errors import ActorDead, AuthFailed
from ratchet.messages import AbortLoad, BurnVersion, VersionBurnt
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.base import Ref
from ratchet.transport.mailbox.book import AddressBook
from ratchet.transport.mailbox.limits import Limits

ANYWHERE = Address.parse("tcp:127.0.0.1:0")
DEATH = "the process of b has ended"


def over_tcp(scene: Callable[[Town], Coroutine[Any, Any, None]], **limits: Any) -> None:
    async def play() -> None:
        async with (
            asyncio.timeout(30),
            stopping(Town(lambda name: ANYWHERE, Limits(**limits))) as t,
        ):
            await scene(t)

    asyncio.run(play())


def ask(ref: Ref, number: int = 1, timeout: float = 20.0) -> Awaitable[VersionBurnt]:
    return ref.ask(BurnVersion(0, number, ""), block=False, timeout=timeout)


async def start_b(town: Town, **kwargs: Any) -> Host:
    b = await town.start("b", **kwargs)
    b.inbox.answer = lambda message: VersionBurnt(message.version)
    return b


async def linked(town: Town) -> tuple[Host, Host, AddressBook, Ref]:
    """Return a, b, the book of a, which has heard of b, and a's ref to b, watched and in use."""
    book = AddressBook()
    a, b = await town.start("a", locate=book.locate), await start_b(town)
    book.learn("b", str(b.node.address))
    ref = a.node.ref("b")
    ref.watch(a.inbox)
    await ask(ref)
    return a, b, book, ref


def errors(host: Host) -> list[Any]:
    return [event for event in host.log.events if event[0] == "error"]


def test_a_ref_follows_a_role_to_its_next_port() -> None:
    async def scene(town: Town) -> None:
        a, b, book, ref = await linked(town)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        b.kill()
        [down] = await a.inbox.has(1)
        assert down.reason == DEATH
        assert loop.time() - begin < 1.0
        early = asyncio.ensure_future(ask(ref, 2))  # nobody has told yet where it is
        reborn = await start_b(town)
        assert reborn.node.address != b.node.address
        book.learn("b", str(reborn.node.address))
        assert await early == VersionBurnt(2)
        assert await ask(ref, 3) == VersionBurnt(3)
        assert not errors(a)

    over_tcp(scene)


def test_a_peer_that_has_dialled_in_is_known_dead_by_its_address_alone() -> None:
    async def scene(town: Town) -> None:
        book = AddressBook()
        a, b = await town.start("a", locate=book.locate), await town.start("b")
        b.node.ref("a").tell(AbortLoad(0, 1, ""))
        await a.inbox.has(1)
        book.learn("b", str(b.node.address))
        a.node.ref("b").watch(a.inbox)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        b.kill()
        assert (await a.inbox.has(2))[1].reason == DEATH
        assert loop.time() - begin < 1.0

    over_tcp(scene)


async def answer_as_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(100)
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    writer.close()


async def answer_as_tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(100)
    writer.write(b"\x15\x03\x01\x00\x02\x02\x46")
    writer.close()


async def settle_in(kind: str, town: Town, address: Address) -> Any:
    """Start something else at an address that was b's."""
    if kind == "another role":
        return await town.start("c", address=address)
    if kind == "another run":
        return await Town(lambda name: address).start("b", run_id="other", key=bytes(range(1, 33)))
    answer = answer_as_http if kind == "a web server" else answer_as_tls
    return await asyncio.start_server(answer, address.host, address.port)


async def move_out(tenant: Any) -> None:
    if isinstance(tenant, Host):
        await tenant.node.stop(1.0)
    else:
        tenant.close()
        await tenant.wait_closed()


@pytest.mark.parametrize("kind", ["another role", "another run", "a web server", "a TLS server"])
def test_somebody_else_at_its_address_means_that_it_has_died(kind: str) -> None:
    async def scene(town: Town) -> None:
        a, b, book, ref = await linked(town)
        assert b.node.address is not None
        b.inbox.answer = None
        lost = asyncio.ensure_future(ask(ref, 6))
        await b.inbox.has(2)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        assert b.node._listener is not None
        b.node._listener.close()
        tenant = await settle_in(kind, town, b.node.address)
        b.kill()
        with pytest.raises(ActorDead, match=DEATH):
            await lost
        assert loop.time() - begin < 1.0
        [down] = a.inbox.told
        assert down.reason.startswith(DEATH)
        assert not errors(a)
        reborn = await start_b(town)
        book.learn("b", str(reborn.node.address))
        assert await ask(ref, 7) == VersionBurnt(7)
        assert not errors(a)
        await move_out(tenant)

    over_tcp(scene)


def test_a_refusal_at_an_address_ends_with_the_address() -> None:
    """Asked while the book still has the old port, where another run listens now."""

    async def scene(town: Town) -> None:
        a, b, book, ref = await linked(town)
        assert b.node.address is not None
        b.kill()
        await a.inbox.has(1)
        tenant = await settle_in("another run", town, b.node.address)
        for _ in range(3):
            with pytest.raises(AuthFailed):
                await ask(ref)
        assert len(a.log.named("link_refused")) == 1
        reborn = await start_b(town)
        book.learn("b", str(reborn.node.address))
        assert await ask(ref, 7) == VersionBurnt(7)
        await move_out(tenant)

    over_tcp(scene)


def test_a_watch_at_a_refused_address_begins_anew_at_the_next() -> None:
    async def scene(town: Town) -> None:
        book = AddressBook()
        a = await town.start("a", locate=book.locate)
        stranger = await settle_in("another run", town, ANYWHERE)
        book.learn("b", str(stranger.node.address))
        ref = a.node.ref("b")
        with pytest.raises(AuthFailed):
            await ask(ref)
        ref.watch(a.inbox)
        assert len(a.inbox.told) == 1  # at once: it will not be dialled there again
        b = await start_b(town)
        book.learn("b", str(b.node.address))
        ref.watch(a.inbox)
        await ask(ref)
        assert len(a.inbox.told) == 1
        b.kill()
        await a.inbox.has(2)
        await move_out(stranger)

    over_tcp(scene)


def test_who_answers_nothing_at_the_address_is_given_the_time_of_the_dead() -> None:
    async def scene(town: Town) -> None:
        a, b, _, _ = await linked(town)
        assert b.node.address is not None
        assert b.node._listener is not None
        b.node._listener.close()
        loop = asyncio.get_running_loop()
        mute = await loop.create_server(asyncio.Protocol, b.node.address.host, b.node.address.port)
        begin = loop.time()
        b.kill()
        [down] = await a.inbox.has(1)
        assert down.reason == "b did not come back within 1.5 s"
        assert 1.5 <= loop.time() - begin < 5.0
        mute.close()
        await a.node.stop(0.1)
        await mute.wait_closed()

    over_tcp(scene, dead_s=1.5, heartbeat_s=0.1, hello_s=0.4)


def test_where_an_earlier_life_listened_says_nothing_of_the_next() -> None:
    async def scene(town: Town) -> None:
        a, b, book, _ = await linked(town)
        b.kill()
        await a.inbox.has(1)
        reborn = await start_b(town)
        reborn.node.ref("a").tell(BurnVersion(0, 1, ""))  # nobody has told where it is
        await a.inbox.has(2)
        peer = a.node._peers["b"]
        kept, peer._out.connection = peer._out.connection, None
        peer.on_absent()
        assert peer.gone is None
        book.learn("b", str(reborn.node.address))
        peer.on_absent()
        assert str(peer.gone) == DEATH
        assert kept is not None
        kept.abort()

    over_tcp(scene)
