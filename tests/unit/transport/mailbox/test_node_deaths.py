"""Nodes whose peers die, stop, hang or come back as another life: who is told, and when."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.helpers.node_scenes import ask, bulk, echo, note, numbers, virtual
from tests.helpers.nodes import Inbox, MemoryWire, Town

from ratchet.errors import ActorDead
from ratchet.messages import Down, PromptsClaimed, VersionBurnt


def test_a_killed_peer_is_known_dead_in_well_under_a_second() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        ref = a.node.ref("b")
        ref.watch(a.inbox)
        reply = ask(ref, timeout=600.0)
        await b.inbox.has(1)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        b.kill()
        with pytest.raises(ActorDead, match="the process of b has ended"):
            await reply
        assert loop.time() - begin < 0.1
        assert a.inbox.told == [Down("b", "the process of b has ended")]
        ref.watch(a.inbox)  # at once: it is gone
        assert len(a.inbox.told) == 2
        await asyncio.sleep(100.0)
        assert len(a.inbox.told) == 2
        [status] = a.node.links()
        assert not status.connected
        assert status.trouble == "the process of b has ended"

    virtual(scene)


def test_the_larger_name_learns_of_a_death_too() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        b.node.ref("a").watch(b.inbox)
        b.node.ref("a").tell(note(1))
        await a.inbox.has(1)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        a.kill()
        await b.inbox.has(1)
        assert loop.time() - begin < 0.1
        assert b.inbox.told == [Down("a", "the process of a has ended")]

    virtual(scene)


def test_a_restarted_peer_gets_nothing_that_was_sent_to_its_last_life() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        ref = a.node.ref("b")
        ref.tell(note(0))
        await b.inbox.has(1)
        ref.watch(a.inbox)
        await asyncio.sleep(1.0)
        b.kill()
        # before a has heard of the end: still for the old life
        ref.tell(note(1))
        reply = ask(ref, 2, timeout=600.0)
        reborn = await town.start("b")
        reborn.inbox.answer = echo
        with pytest.raises(ActorDead):
            await reply
        ref.tell(note(3))
        assert await ask(ref, 4) == VersionBurnt(4)
        assert reborn.inbox.told[0] == note(3)
        assert [m for _, m, _ in a.letters.all] == [note(1)]
        assert [type(m) for m in a.inbox.told] == [Down]
        assert a.node._peers["b"].lives.present == "b/3"

    virtual(scene)


def test_a_peer_restarted_unseen_is_told_by_its_hello() -> None:
    """The new life dials before the end of the old one is noticed."""

    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        a.node.ref("b").watch(a.inbox)
        a.node.ref("b").tell(note(0))
        await b.inbox.has(1)
        old = a.node._peers["b"]._out.connection
        assert isinstance(town.wire, MemoryWire)
        town.wire.accepts.pop(b.node.address)
        reborn = await town.start("b")
        reborn.node.ref("a").tell(note(5))
        told = await a.inbox.has(2)
        assert told == [Down("b", "b has restarted"), note(5)]
        assert a.node._peers["b"]._out.connection is not old
        # and the old life, which still runs, is not let in again
        b.node.ref("a").tell(note(6))
        with pytest.raises(ActorDead, match="a newer process has taken the name b"):
            await ask(b.node.ref("a"), timeout=600.0)
        assert [m for _, m, _ in b.letters.all] == [note(6)]
        assert len(a.inbox.told) == 2

    virtual(scene)


def test_an_answer_for_a_life_that_is_over_is_a_dead_letter() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        replies: list[asyncio.Future[Any]] = []

        class Slow(Inbox):
            def ask(self, message: Any, **kwargs: Any) -> Any:
                replies.append(super().ask(message, **kwargs))
                return replies[-1]

        b.inbox = Slow("b")
        asyncio.ensure_future(ask(a.node.ref("b"))).cancel()
        await b.inbox.has(1)
        a.kill()
        reborn = await town.start("a")
        reborn.node.ref("b").tell(note(1))
        await b.inbox.has(2)
        replies[0].set_result(VersionBurnt(1))
        await asyncio.sleep(1.0)
        assert [(r, m) for r, m, _ in b.letters.all] == [("a", VersionBurnt(1))]
        assert reborn.node.num_late_replies == 0

    virtual(scene)


def test_a_silent_peer_is_suspected_then_dead_and_welcome_when_it_is_back() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        ref = a.node.ref("b")
        ref.watch(a.inbox)
        reply = ask(ref, timeout=600.0)
        await b.inbox.has(1)
        assert b.node._ticker is not None
        b.node._ticker.cancel()  # no heartbeats: its loop hangs
        await asyncio.sleep(4.0)
        assert a.node.links()[0].connected
        assert a.node.links()[0].silent_s >= 2.0
        await asyncio.sleep(3.0)
        assert [e["silent_s"] for e in a.log.named("peer_silent")] == [5.0]
        assert not a.inbox.told
        with pytest.raises(ActorDead, match="b was silent for 15 s"):
            await reply
        [down] = a.inbox.told
        assert "silent" in down.reason
        b.node._tick()
        await asyncio.sleep(
            1.0
        )  # b finds the connection cut, dials, and learns that it was given up
        b.node.ref("a").tell(note(7))
        await a.inbox.has(2)
        assert numbers(a.inbox.told[1:]) == [7]
        ref.tell(note(8))
        assert (await b.inbox.has(2))[-1] == note(8)

    virtual(scene)


def test_an_idle_link_lives_on_heartbeats() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        a.node.ref("b").watch(a.inbox)
        a.node.ref("b").tell(note(1))
        await b.inbox.has(1)
        await asyncio.sleep(1000.0)
        assert not a.inbox.told
        assert a.node.links()[0].silent_s == 0.0
        assert not a.log.named("link_cut")

    virtual(scene)


def test_a_peer_that_neither_answers_nor_refuses_is_dead_in_time() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        a.node.ref("b").watch(a.inbox)
        a.node.ref("b").tell(note(1))
        await b.inbox.has(1)
        assert isinstance(town.wire, MemoryWire)
        town.wire.unreachable |= {a.node.address, b.node.address}
        loop = asyncio.get_running_loop()
        begin = loop.time()
        town.wire.cut()
        [down] = await a.inbox.has(1)
        assert down == Down("b", "b did not come back within 15 s")
        assert 15.0 <= loop.time() - begin <= 16.1

    virtual(scene)


def test_a_stop_is_told_and_what_was_queued_arrives_first() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        a.node.ref("b").watch(a.inbox)
        a.node.ref("b").tell(note(0))
        await b.inbox.has(1)
        for i in range(200):
            b.node.ref("a").tell(bulk(i, 10_000))
        reply = asyncio.ensure_future(ask(b.node.ref("a"), timeout=600.0))
        await asyncio.sleep(0)
        await b.node.stop(10.0)
        with pytest.raises(ActorDead, match="b has stopped"):
            await reply
        told = await a.inbox.has(202)
        assert sorted(numbers([m for m in told if isinstance(m, PromptsClaimed)])) == list(
            range(200)
        )
        assert told[-1] == Down("b", "b has stopped: b stops")
        b.node.ref("a").tell(note(1))
        b.node.ref("c").tell(note(2))
        assert [m for _, m, _ in b.letters.all] == [note(1), note(2)]
        await b.node.stop(10.0)

    virtual(scene)


def test_a_stop_does_not_wait_for_what_cannot_be_delivered() -> None:
    async def scene(town: Town) -> None:
        a = await town.start("a")
        town.build("b")
        a.node.ref("b").tell(note(1))
        loop = asyncio.get_running_loop()
        begin = loop.time()
        await a.node.stop(2.0)
        assert 2.0 <= loop.time() - begin < 2.1
        assert [m for _, m, _ in a.letters.all] == [note(1)]
        c, d = await town.start("c"), await town.start("d")
        c.node.ref("d").tell(note(1))
        await d.inbox.has(1)
        d.kill()
        await asyncio.sleep(1.0)
        c.node.ref("d").tell(note(2))  # d is known to be dead
        begin = loop.time()
        await c.node.stop(2.0)
        assert loop.time() - begin < 0.1

    virtual(scene)
