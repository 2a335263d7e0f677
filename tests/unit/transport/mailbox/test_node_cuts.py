"""Nodes that lose a connection, or dial each other at once: nothing is lost, nothing doubled."""

from __future__ import annotations

import asyncio

import pytest
from tests.helpers.groups import finished
from tests.helpers.node_scenes import ask, bulk, cut, note, numbers, virtual
from tests.helpers.nodes import MemoryWire, Town


def test_a_cut_is_not_a_death() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        ref = a.node.ref("b")
        ref.watch(a.inbox)
        for i in range(3000):
            ref.tell(note(i))
            b.node.ref("a").tell(bulk(i, 1000))
            if i % 100 == 99:
                await asyncio.sleep(0)
                cut(town)
                await asyncio.sleep(0.001)
        hanging = asyncio.ensure_future(ask(ref, timeout=600.0))
        await b.inbox.has(3001)
        cut(town)
        await asyncio.sleep(10.0)
        assert not hanging.done()
        assert numbers(b.inbox.told[:3000]) == list(range(3000))
        assert numbers(a.inbox.told) == list(range(3000))  # and no Down
        assert len(b.inbox.told) == 3001
        assert not a.letters.all
        assert not b.letters.all
        assert len(a.log.named("link_cut")) > 10
        hanging.cancel()

    virtual(scene)


def test_a_group_arrives_with_its_arrays_over_cuts_too() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        groups = [finished(*(3 * size for size in range(0, 9_000, 1_500))) for _ in range(20)]
        for index, group in enumerate(groups):
            a.node.ref("b").tell(group)
            if index % 5 == 4:
                await asyncio.sleep(0)
                cut(town)
                await asyncio.sleep(0.001)
        assert await b.inbox.has(20) == groups
        assert not a.letters.all

    virtual(scene)


def test_dials_that_cross_lose_and_double_nothing() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        for i in range(100):
            a.node.ref("b").tell(note(i))
            b.node.ref("a").tell(note(i))
            if i % 10 == 9:
                await asyncio.sleep(0.5)
                cut(town)
                # both notice and dial at once
                for host, other in ((a, "b"), (b, "a")):
                    host.node._peers[other]._dialler.start()
        await asyncio.sleep(5.0)
        assert numbers(a.inbox.told) == numbers(b.inbox.told) == list(range(100))
        assert len(a.node._connections) == len(b.node._connections) == 1
        # the one that the smaller name has dialled
        connection = a.node._peers["b"]._out.connection
        assert connection is not None
        assert connection.handshake.dials

    virtual(scene)


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_of_two_dials_that_cross_both_keep_the_same_one(names: tuple[str, str]) -> None:
    async def scene(town: Town) -> None:
        first, second = [await town.start(name) for name in names]
        first.node.ref(names[1]).tell(note(1))
        second.node.ref(names[0]).tell(note(1))
        await first.inbox.has(1)
        await second.inbox.has(1)
        await asyncio.sleep(1.0)
        assert isinstance(town.wire, MemoryWire)
        assert town.wire.num_dials == 2
        for host, other in ((town.hosts["a"], "b"), (town.hosts["b"], "a")):
            assert len(host.node._connections) == 1
            connection = host.node._peers[other]._out.connection
            assert connection is not None
            assert connection.handshake.dials == (other == "b")
            assert numbers(host.inbox.told) == [1]

    virtual(scene)


def test_a_peer_that_lost_the_connection_unseen_gets_a_new_one() -> None:
    """The smaller name believes in a connection that the larger one no longer has."""

    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        a.node.ref("b").tell(note(1))
        await b.inbox.has(1)
        await asyncio.sleep(10.0)
        peer = b.node._peers["a"]
        old = peer._out.connection
        assert old is not None
        peer.on_cut(old)  # and its end is not closed
        b.node.ref("a").tell(note(2))
        await a.inbox.has(1)
        assert b.node._peers["a"]._out.connection is not old
        assert not a.letters.all

    virtual(scene)
