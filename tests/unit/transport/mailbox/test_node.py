"""Nodes in virtual time, on a network in memory: lives, cuts, deadlines, verdicts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from tests.helpers.groups import finished
from tests.helpers.nodes import KEY, Inbox, MemoryWire, Town, memory_town, stopping
from tests.simulation.loop import run_virtual

from ratchet.errors import ActorDead, AskTimeout, AuthFailed, ConfigError, ProtocolError, StaleTerm
from ratchet.messages import AbortLoad, BurnVersion, Down, Message, PromptsClaimed, VersionBurnt
from ratchet.transport.mailbox.base import Ref, Trace, current_trace
from ratchet.transport.mailbox.codec import encode_envelope
from ratchet.transport.mailbox.frames import BULK, CONTROL, Answer
from ratchet.transport.mailbox.limits import Limits
from ratchet.types import Assignment, Prompt


def note(number: int) -> AbortLoad:
    return AbortLoad(0, number, "note")


def bulk(number: int, size: int = 0, **metadata: Any) -> PromptsClaimed:
    prompt = Prompt("p", "x" * size, metadata=metadata)
    return PromptsClaimed("i", (Assignment(number, 0, 0, prompt, 1, 1.0),))


def ask(ref: Ref, number: int = 0, timeout: float = 10.0) -> Awaitable[VersionBurnt]:
    return ref.ask(BurnVersion(0, number, "ask"), block=False, timeout=timeout)


def echo(message: BurnVersion) -> VersionBurnt:
    return VersionBurnt(message.version)


def numbers(told: list[Any]) -> list[int]:
    return [m.version if isinstance(m, AbortLoad) else m.assignments[0].group_id for m in told]


def virtual(
    scene: Callable[[Town], Coroutine[Any, Any, None]], limits: Limits | None = None
) -> None:
    async def play() -> None:
        async with asyncio.timeout(3600), stopping(memory_town(limits or Limits())) as town:
            await scene(town)

    run_virtual(play())


def cut(town: Town) -> None:
    assert isinstance(town.wire, MemoryWire)
    town.wire.cut()


# --- messages


def test_a_message_brings_its_trace() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        token = current_trace.set(Trace("t-1", 7))
        a.node.ref("b").tell(note(1))
        current_trace.reset(token)
        a.node.ref("b").tell(note(2))
        await b.inbox.has(2)
        assert b.inbox.traces == [Trace("t-1", 7), None]
        assert current_trace.get() is None

    virtual(scene)


def test_a_message_waits_for_a_node_that_is_not_up_yet() -> None:
    async def scene(town: Town) -> None:
        a = await town.start("a")
        b = town.build("b")
        b.inbox.answer = echo
        a.node.ref("b").tell(note(1))
        reply = ask(a.node.ref("b"), 2)
        await asyncio.sleep(5.0)
        assert not b.inbox.told
        await b.node.start()
        assert await reply == VersionBurnt(2)
        assert b.inbox.told[0] == note(1)
        assert not a.letters.all

    virtual(scene)


def test_a_node_that_nobody_can_locate_yet_is_waited_for() -> None:
    async def scene(town: Town) -> None:
        a = await town.start("a")
        a.node.ref("b").tell(note(1))  # locate raises KeyError
        await asyncio.sleep(1.0)
        b = await town.start("b")
        await b.inbox.has(1)

    virtual(scene)


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


def test_an_ask_of_a_node_that_is_not_up_ends_at_its_own_deadline() -> None:
    async def scene(town: Town) -> None:
        a = await town.start("a")
        town.build("b")
        with pytest.raises(AskTimeout, match="a asked b for BurnVersion; no reply within 2 s"):
            await ask(a.node.ref("b"), timeout=2.0)

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


def test_errors_come_back_as_they_were_raised() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        b.inbox.answer = lambda message: StaleTerm("fenced")
        with pytest.raises(StaleTerm, match="fenced"):
            await ask(a.node.ref("b"))
        b.inbox.answer = lambda message: object()
        with pytest.raises(Exception, match="object is not a message that may cross"):
            await ask(a.node.ref("b"))

    virtual(scene)


def test_a_late_and_a_second_reply_are_counted_and_ignored() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        with pytest.raises(AskTimeout):
            await ask(a.node.ref("b"), timeout=1.0)
        assert a.node.num_late_replies == 0
        b.inbox.answer = echo
        reply = await ask(a.node.ref("b"), 5)
        for ask_id in (1, 2):  # the one that timed out, and the one that has its reply
            b.node._peers["a"].send(CONTROL, encode_envelope(Answer(ask_id, VersionBurnt(9))))
        assert await ask(a.node.ref("b"), 6) == VersionBurnt(6)
        assert reply == VersionBurnt(5)
        assert a.node.num_late_replies == 2

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


def test_a_control_message_passes_a_long_one() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        b.inbox.answer = echo
        await ask(a.node.ref("b"))
        a.node.ref("b").tell(bulk(1, 64 << 20))
        a.node.ref("b").tell(note(2))
        told = await b.inbox.has(3)
        assert [type(m) for m in told] == [BurnVersion, AbortLoad, PromptsClaimed]

    virtual(scene)


def test_a_long_message_leaves_the_loop_to_others() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        b.inbox.answer = echo
        await ask(a.node.ref("b"))
        await asyncio.sleep(1.0)
        session = a.node._peers["b"].session
        a.node.ref("b").tell(bulk(1, 64 << 20))
        most = 0
        while len(b.inbox.told) < 2:
            before = session._lanes[BULK]._last_seq
            await asyncio.sleep(0)
            most = max(most, session._lanes[BULK]._last_seq - before)
        assert 1 <= most <= 5  # fragments of 256 KiB, in one turn

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


def test_a_group_that_never_arrives_is_a_whole_dead_letter() -> None:
    async def scene(town: Town) -> None:
        a = await town.start("a")
        town.build("b")
        a.node.ref("b").tell(finished(100_000))
        await asyncio.sleep(40.0)
        assert [m for _, m, _ in a.letters.all] == [finished(100_000)]

    virtual(scene)


def test_a_trace_does_not_leak_into_what_has_none() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        ref = a.node.ref("b")
        for number in range(6):
            token = current_trace.set(Trace(f"t{number}", number) if number % 2 else None)
            ref.tell(note(number))
            current_trace.reset(token)
        await b.inbox.has(6)
        assert b.inbox.traces == [Trace(f"t{n}", n) if n % 2 else None for n in range(6)]
        assert current_trace.get() is None

    virtual(scene)


# --- this process's own actors


def test_a_ref_to_an_actor_of_this_process_finds_it_anew_each_time() -> None:
    async def scene(town: Town) -> None:
        actors: dict[str, Inbox] = {}
        a = await town.start("a", local=actors.get)
        ref = a.node.ref("a")
        assert ref.name == "a"
        ref.tell(note(1))
        ref.watch(a.inbox)
        with pytest.raises(ActorDead, match="no actor a in this process"):
            await ask(ref)
        assert [m for _, m, _ in a.letters.all] == [note(1)]
        assert a.inbox.told == [Down("a", "there is no actor a in this process")]
        actors["a"] = Inbox("a")
        actors["a"].answer = echo
        ref.tell(note(2))
        ref.watch(a.inbox)
        assert await ask(ref, 3) == VersionBurnt(3)
        assert actors["a"].told[0] == note(2)
        assert actors["a"].watchers == [a.inbox]

    virtual(scene)


# --- cuts


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


# --- deaths


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


# --- who is let in


def test_a_wrong_key_is_clear_on_both_ends_and_said_once() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b", key=bytes(32))
        ref = a.node.ref("b")
        ref.tell(note(1))
        ref.watch(a.inbox)
        with pytest.raises(AuthFailed, match="b refuses the link: a and b do not hold the same"):
            await ask(ref)
        assert isinstance(town.wire, MemoryWire)
        dials = town.wire.num_dials
        for _ in range(3):
            with pytest.raises(AuthFailed):
                await ask(ref)
        ref.watch(a.inbox)
        await asyncio.sleep(60.0)
        assert town.wire.num_dials == dials == 1  # not retried
        assert [m for _, m, _ in a.letters.all] == [note(1)]
        assert [type(m) for m in a.inbox.told] == [Down, Down]
        assert len(a.log.named("link_refused")) == 1
        assert len(b.log.named("auth_failed")) == 1
        assert b.log.named("auth_failed")[0]["peer"] == "a"
        with pytest.raises(AuthFailed, match="a refuses the link"):
            await ask(b.node.ref("a"))
        assert not b.inbox.told
        for host in (a, b):
            for event in host.log.events:
                assert KEY.hex() not in str(event)
                assert repr(KEY) not in str(event)

    virtual(scene)


def test_a_refused_peer_that_comes_with_the_right_key_is_welcome() -> None:
    async def scene(town: Town) -> None:
        a = await town.start("a")
        wrong = await town.start("b", key=bytes(32))
        with pytest.raises(AuthFailed):
            await ask(a.node.ref("b"))
        wrong.kill()
        right = await town.start("b")
        right.inbox.answer = echo
        right.node.ref("a").tell(note(1))
        await a.inbox.has(1)
        assert await ask(a.node.ref("b"), 2) == VersionBurnt(2)

    virtual(scene)


def test_another_run_is_refused() -> None:
    async def scene(town: Town) -> None:
        a, _ = await town.start("a"), await town.start("b", run_id="other")
        with pytest.raises(AuthFailed, match="a is of run 'run' and b of 'other'"):
            await ask(a.node.ref("b"))

    virtual(scene)


@pytest.mark.parametrize("key", [b"", b"short"])
def test_a_missing_key_is_a_mistake_of_the_configuration(key: bytes) -> None:
    async def scene(town: Town) -> None:
        with pytest.raises(ConfigError, match=f"link key of a has {len(key)} bytes"):
            town.build("a", key=key)

    virtual(scene)


def test_an_address_that_another_name_has_taken_counts_as_nobody_there() -> None:
    async def scene(town: Town) -> None:
        a, b, c = await town.start("a"), await town.start("b"), await town.start("c")
        a.node.ref("b").watch(a.inbox)
        a.node.ref("b").tell(note(1))
        await b.inbox.has(1)
        town.hosts["b"] = c  # b's port is c's now
        b.kill()
        [down] = await a.inbox.has(1)
        assert down == Down("b", "the process of b has ended")
        assert not c.inbox.told

    virtual(scene)


def test_a_way_that_cannot_exist_fails_at_once() -> None:
    async def scene(town: Town) -> None:
        def locate(name: str) -> Any:
            raise ConfigError(f"no address for {name}")

        a = await town.start("a", locate=locate)
        with pytest.raises(ConfigError, match="no address for b"):
            await ask(a.node.ref("b"))

    virtual(scene)


def test_too_many_connections_are_turned_away() -> None:
    async def scene(town: Town) -> None:
        a = await town.start("a")
        hosts = [await town.start(f"b{i}") for i in range(4)]
        for host in hosts:
            host.node.ref("a").tell(note(1))
        await asyncio.sleep(1.0)
        assert len(a.inbox.told) == 2
        assert len(a.node._connections) == 2
        for host in hosts:
            if host.node.links()[0].connected:
                host.kill()
        await asyncio.sleep(2.0)
        assert len(a.inbox.told) == 4

    virtual(scene, Limits(connections=2))


def test_a_stranger_that_says_nothing_is_shown_out() -> None:
    async def scene(town: Town) -> None:
        a = await town.start("a")

        class Mute(asyncio.BufferedProtocol):
            lost = False

            def get_buffer(self, sizehint: int) -> memoryview:
                return memoryview(bytearray(1000))

            def buffer_updated(self, nbytes: int) -> None:
                pass

            def connection_lost(self, exc: Exception | None) -> None:
                self.lost = True

        mute = Mute()
        assert town.wire is not None
        await town.wire.dial(a.node.address, lambda: mute)
        await asyncio.sleep(4.9)
        assert not mute.lost
        assert len(a.node._connections) == 1
        await asyncio.sleep(0.2)
        assert mute.lost
        assert not a.node._connections

    virtual(scene)


def test_a_peer_that_breaks_the_protocol_is_given_up() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        a.node.ref("b").watch(a.inbox)
        a.node.ref("b").tell(note(1))
        await b.inbox.has(1)
        connection = a.node._peers["b"]._out.connection
        assert connection is not None
        connection.write(b"\x00\x00\x00\x01\xc1")
        [down] = await a.inbox.has(1)
        assert down.name == "b"
        assert len(b.log.named("link_broken")) == 1
        a.node.ref("b").tell(note(2))
        await b.inbox.has(2)

    virtual(scene)


def test_a_peer_that_claims_too_much_at_the_hello_is_given_up() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        a.node.ref("b").tell(note(1))
        await b.inbox.has(1)
        b.node._peers["a"].session._lanes[0].delivered = 99
        cut(town)
        await asyncio.sleep(1.0)
        a.node.ref("b").tell(note(2))
        await b.inbox.has(2)
        assert [host.node.links()[0].connected for host in (a, b)] == [True, True]

    virtual(scene)


def test_status_shows_links_and_waits() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        reply = asyncio.ensure_future(ask(a.node.ref("b"), timeout=60.0))
        await b.inbox.has(1)
        [wait] = a.node.waits()
        assert (wait.who, wait.on, wait.what) == ("a", "b", "BurnVersion")
        assert wait.until - wait.since == 60.0
        assert a.node.links()[0].connected
        reply.cancel()
        await asyncio.sleep(0)
        assert KEY.hex() not in repr(vars(a.node))
        assert repr(KEY) not in repr(vars(a.node))

    virtual(scene)


def test_a_request_that_is_no_ask_is_answered_with_an_error() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        with pytest.raises(Exception, match="AbortLoad is told, it has no reply"):
            await a.node.ref("b").ask(note(1), block=False, timeout=5.0)  # type: ignore[arg-type]
        assert not b.inbox.told

    virtual(scene)
