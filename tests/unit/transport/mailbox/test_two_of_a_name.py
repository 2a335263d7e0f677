"""Two processes of one name that both live: the registry's order counts, not who came when."""

from __future__ import annotations

import asyncio

import pytest
from tests.helpers.node_scenes import ask, note, virtual
from tests.helpers.nodes import Host, MemoryWire, Town

from ratchet.errors import ActorDead
from ratchet.messages import VersionBurnt
from ratchet.transport.mailbox.book import AddressBook
from ratchet.transport.mailbox.connection import Connection, Link


async def two(town: Town, book: AddressBook) -> tuple[Host, Host, Host]:
    """Return a, which goes by the book, and b/2 and b/3, which have both spoken to it."""
    a = await town.start("a", is_newest=book.is_newest)
    a.inbox.answer = lambda message: VersionBurnt(message.version)
    first = await town.start("b")
    first.node.ref("a").tell(note(1))
    await a.inbox.has(1)
    assert isinstance(town.wire, MemoryWire)
    town.wire.accepts.pop(first.node.address)
    second = await town.start("b")
    second.node.ref("a").tell(note(2))
    await a.inbox.has(2)
    return a, first, second


async def refused(host: Host) -> None:
    with pytest.raises(ActorDead, match="a newer process has taken the name b"):
        await ask(host.node.ref("a"), timeout=600.0)


async def comes_back(host: Host) -> None:
    """What it has said before is not known any more, and it is told."""
    with pytest.raises(ActorDead, match="a gave this node up"):
        await ask(host.node.ref("a"))
    await ask(host.node.ref("a"))


def test_without_a_word_the_last_that_came_is_the_newest() -> None:
    async def play(town: Town) -> None:
        _, first, second = await two(town, AddressBook())
        await refused(first)
        await ask(second.node.ref("a"))

    virtual(play)


def test_the_registry_brings_back_who_came_first_here() -> None:
    # b/3 was stopped before it had registered, b/2 registered, and b/3 goes on
    async def play(town: Town) -> None:
        book = AddressBook()
        _, first, second = await two(town, book)
        await refused(first)
        book.learn("b", "", "b/3")
        book.learn("b", "", "b/2")
        await asyncio.sleep(town.limits.hello_s)  # a refusal counts for so long
        await comes_back(first)
        await refused(second)
        await ask(first.node.ref("a"))

    virtual(play)


def test_who_was_the_newest_before_finds_another_session_than_it_had() -> None:
    # the registry has told of both, dies, and in its next life b/2 registers last
    async def play(town: Town) -> None:
        book = AddressBook()
        book.learn("b", "", "b/2")
        a = await town.start("a", is_newest=book.is_newest)
        first = await town.start("b")
        first.node.ref("a").tell(note(1))
        await a.inbox.has(1)
        assert isinstance(town.wire, MemoryWire)
        town.wire.accepts.pop(first.node.address)
        book.learn("b", "", "b/3")
        second = await town.start("b")
        second.node.ref("a").tell(note(2))
        await a.inbox.has(2)
        book.learn("b", "", "b/2")  # before the first dials again, and would be refused
        first.node.ref("a").tell(note(3))
        a.inbox.answer = lambda message: VersionBurnt(message.version)
        await comes_back(first)
        await refused(second)

    virtual(play)


def test_one_that_is_not_announced_yet_is_not_shut_out_by_the_one_that_is() -> None:
    async def play(town: Town) -> None:
        book = AddressBook()
        book.learn("b", "", "b/2")
        _, first, second = await two(town, book)
        await comes_back(first)
        book.learn("b", "", "b/3")
        await comes_back(second)
        await refused(first)

    virtual(play)


def test_a_life_that_is_not_the_newest_is_refused_although_it_comes_first() -> None:
    async def play(town: Town) -> None:
        book = AddressBook()
        book.learn("b", "", "b/2")
        book.learn("b", "", "b/9")
        a = await town.start("a", is_newest=book.is_newest)
        late = await town.start("b")
        await refused(late)
        assert a.inbox.told == []

    virtual(play)


@pytest.mark.parametrize("was_here", [True, False])
def test_one_that_is_replaced_during_its_hello_does_not_replace_the_newer(was_here: bool) -> None:
    # the last bytes of a registered buffer that had died came after its next life, which was
    # refused then, and the run ended
    async def play(town: Town) -> None:
        a = await town.start("a")
        first = await town.start("b")
        done = a.node.on_hello_done
        lives = a.node._peers["b"].lives

        def meanwhile(connection: Connection) -> Link | None:
            if was_here:
                lives.come("b/2", 0.0)
            lives.come("b/3", connection.made_at + 0.001)
            return done(connection)

        a.node.on_hello_done = meanwhile  # type: ignore[method-assign]
        await refused(first)
        assert lives.present == "b/3"

    virtual(play)
