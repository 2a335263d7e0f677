"""What a node that holds the key may not do to the others, with frames that are well formed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.helpers.nodes import Host, Town, memory_town, stopping

from ratchet.errors import HandlerFailed
from ratchet.messages import AbortLoad, BurnVersion, Down, VersionBurnt
from ratchet.transport.mailbox.codec import encode_envelope, encode_note
from ratchet.transport.mailbox.frames import CONTROL, Answer, Ended, Failure, Request


def among(scene: Callable[[Town, Host, Host, Host], Coroutine[Any, Any, None]]) -> None:
    """Three nodes with links: "a" trusts, "b" is honest, "c" lies."""

    async def play() -> None:
        town = memory_town()
        async with asyncio.timeout(10), stopping(town):
            a, b, c = [await town.start(name) for name in "abc"]
            c.node.ref("a").tell(AbortLoad(0, 0, "open the link"))
            await a.inbox.has(1)
            await scene(town, a, b, c)

    asyncio.run(play())


def test_only_who_was_asked_can_answer() -> None:
    async def scene(town: Town, a: Host, b: Host, c: Host) -> None:
        del town
        reply = asyncio.ensure_future(
            a.node.ref("b").ask(BurnVersion(0, 1, ""), block=False, timeout=5.0)
        )
        [question] = await b.inbox.has(1)
        for number in range(9):
            answer = encode_envelope(Answer(number, VersionBurnt(666)))
            c.node._peers["a"].send(CONTROL, answer)
            failure = encode_note(Failure(number, "ActorDead", "says c"))
            c.node._peers["a"].send(CONTROL, failure)
        c.node.ref("a").tell(AbortLoad(0, 1, "after the lies"))
        await a.inbox.has(2)
        assert not reply.done()
        assert question == BurnVersion(0, 1, "")
        [ask_id] = a.node._calls._asked
        b.node._peers["a"].send(CONTROL, encode_envelope(Answer(ask_id, VersionBurnt(1))))
        assert await reply == VersionBurnt(1)

    among(scene)


def test_only_the_watched_end_can_say_that_it_has_ended() -> None:
    async def scene(town: Town, a: Host, b: Host, c: Host) -> None:
        del town
        a.node.ref("b").watch(a.inbox)
        a.node.ref("b").tell(AbortLoad(0, 2, "after the watch"))
        await b.inbox.has(1)
        for number in range(9):
            c.node._peers["a"].send(CONTROL, encode_note(Ended(number, "says c")))
        c.node.ref("a").tell(AbortLoad(0, 1, "after the lies"))
        assert await a.inbox.has(2) == [
            AbortLoad(0, 0, "open the link"),
            AbortLoad(0, 1, "after the lies"),
        ]
        b.kill()
        assert (await a.inbox.has(3))[2] == Down("b", "the process of b has ended")

    among(scene)


@pytest.mark.parametrize("timeout", [math.nan, math.inf])
def test_an_ask_without_a_deadline_is_refused_where_it_arrives(timeout: float) -> None:
    """A timer that is due at no time would keep all others of the loop waiting behind it."""

    async def scene(town: Town, a: Host, b: Host, c: Host) -> None:
        del town, b
        ask_id, reply = c.node._calls.open_ask("a", "BurnVersion", 5.0)
        request = Request("c", "a", None, None, ask_id, timeout, BurnVersion(0, 1, ""))
        c.node._peers["a"].send(CONTROL, encode_envelope(request))
        with pytest.raises(HandlerFailed, match="deadline"):
            await reply
        assert a.inbox.told == [AbortLoad(0, 0, "open the link")]

    among(scene)
