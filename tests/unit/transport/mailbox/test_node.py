"""Nodes in virtual time, on a network in memory: messages, to others and to their own actors."""

from __future__ import annotations

import asyncio

import pytest
from tests.helpers.node_scenes import ask, bulk, echo, note, virtual
from tests.helpers.nodes import KEY, Inbox, Town

from ratchet.errors import ActorDead, AskTimeout, StaleTerm
from ratchet.messages import AbortLoad, BurnVersion, Down, PromptsClaimed, VersionBurnt
from ratchet.transport.mailbox.base import Trace, current_trace
from ratchet.transport.mailbox.codec import encode_envelope
from ratchet.transport.mailbox.frames import BULK, CONTROL, Answer

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


def test_an_ask_of_a_node_that_is_not_up_ends_at_its_own_deadline() -> None:
    async def scene(town: Town) -> None:
        a = await town.start("a")
        town.build("b")
        with pytest.raises(AskTimeout, match="a asked b for BurnVersion; no reply within 2 s"):
            await ask(a.node.ref("b"), timeout=2.0)

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


def test_a_request_that_is_no_ask_is_answered_with_an_error() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        with pytest.raises(Exception, match="AbortLoad is told, it has no reply"):
            await a.node.ref("b").ask(note(1), block=False, timeout=5.0)  # type: ignore[arg-type]
        assert not b.inbox.told

    virtual(scene)


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


# --- what it says of itself


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
