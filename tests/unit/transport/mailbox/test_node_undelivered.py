"""What a node makes of messages that cannot be delivered, sent or read: each is accounted for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.helpers.groups import finished
from tests.helpers.node_scenes import ask, bulk, note, numbers, virtual
from tests.helpers.nodes import Inbox, MemoryWire, Town

from ratchet.errors import ActorDead, ProtocolError
from ratchet.messages import BurnVersion, Down, Message
from ratchet.transport.mailbox.limits import Limits


def test_what_is_not_delivered_in_time_is_accounted_for() -> None:
    async def scene(town: Town) -> None:
        a = await town.start("a")
        town.build("b")
        ref = a.node.ref("b")
        begin = asyncio.get_running_loop().time()
        ref.tell(note(1))
        ref.watch(a.inbox)
        with pytest.raises(ActorDead, match="b could not be reached within 30 s: nobody is at"):
            await ask(ref, timeout=600.0)
        spent = asyncio.get_running_loop().time() - begin
        assert 30.0 <= spent <= 31.0
        [(receiver, message, reason)] = a.letters.all
        assert (receiver, message) == ("b", note(1))
        assert "could not be reached" in reason
        [down] = a.inbox.told
        assert isinstance(down, Down)
        assert down.name == "b"
        assert isinstance(town.wire, MemoryWire)
        dials = town.wire.num_dials
        assert 50 < dials < 80  # 0.02 s doubling to 0.5 s
        await asyncio.sleep(100.0)
        assert town.wire.num_dials == dials  # nothing waits for it any more

    virtual(scene)


def test_an_absent_actor_is_a_dead_letter_where_it_is_absent() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b", local=lambda name: None)
        ref = a.node.ref("b")
        ref.tell(note(1))
        with pytest.raises(ActorDead, match="no actor b in the process of b"):
            await ask(ref)
        assert [(r, m) for r, m, _ in b.letters.all] == [("b", note(1))]
        assert not a.letters.all
        ref.watch(a.inbox)
        [down] = await a.inbox.has(1)
        assert down == Down("b", "there is no actor b in the process of b")

    virtual(scene)


def test_an_actor_that_raises_where_it_is_told_spoils_only_that() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")

        class Broken(Inbox):
            def tell(self, message: Message) -> None:
                super().tell(message)
                raise ValueError("boom")

        broken = Broken("b")
        good, b.inbox = b.inbox, broken
        a.node.ref("b").tell(note(1))
        await broken.has(1)
        b.inbox = good
        a.node.ref("b").tell(note(2))
        await good.has(1)
        assert [(m, r) for _, m, r in b.letters.all] == [(note(1), "ValueError: boom")]

    virtual(scene)


def test_what_cannot_be_sent_is_accounted_for_at_once() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        ref = a.node.ref("b")
        ref.tell(bulk(1, x=object()))
        ref.tell(bulk(2, 2000))
        ref.tell(Message())
        ref.tell(bulk(3))
        await b.inbox.has(1)
        assert numbers(b.inbox.told) == [3]
        reasons = [reason for _, _, reason in a.letters.all]
        assert "cannot be encoded" in reasons[0]
        assert "a message may have 1000" in reasons[1]
        assert "not a message that may cross" in reasons[2]
        with pytest.raises(ProtocolError, match="NotOurs is not a message"):
            await ref.ask(NotOurs(0, 0, ""), block=False, timeout=1.0)

    class NotOurs(BurnVersion, frozen=True):
        pass

    virtual(scene, Limits(message_bytes=1000))


def test_a_message_that_cannot_be_read_spoils_only_itself() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        ref = a.node.ref("b")
        nest: dict[str, Any] = {}
        for _ in range(100):
            nest = {"n": nest}
        ref.tell(bulk(1))
        ref.tell(bulk(2, nest=nest))
        ref.tell(bulk(3))
        await b.inbox.has(2)
        assert numbers(b.inbox.told) == [1, 3]
        [(receiver, message, reason)] = b.letters.all
        assert receiver == "b"
        assert isinstance(message, bytes)
        assert reason == "a message is nested more than 64 deep"
        assert not b.log.named("link_broken")

    virtual(scene)


def test_too_much_that_waits_becomes_dead_letters() -> None:
    async def scene(town: Town) -> None:
        a = await town.start("a")
        town.build("b")
        for i in range(5):
            a.node.ref("b").tell(note(i))
        assert [m for _, m, _ in a.letters.all] == [note(3), note(4)]

    virtual(scene, Limits(queue_messages=3))


def test_a_group_that_never_arrives_is_a_whole_dead_letter() -> None:
    async def scene(town: Town) -> None:
        a = await town.start("a")
        town.build("b")
        a.node.ref("b").tell(finished(100_000))
        await asyncio.sleep(40.0)
        assert [m for _, m, _ in a.letters.all] == [finished(100_000)]

    virtual(scene)
