from __future__ import annotations

import asyncio

import pytest
from tests.helpers.nodes import Inbox
from tests.simulation.loop import run_virtual

from ratchet.errors import ActorDead, AskTimeout, AuthFailed
from ratchet.messages import Down, VersionBurnt
from ratchet.transport.mailbox.calls import Calls


async def ended_at(future: asyncio.Future[object]) -> float:
    with pytest.raises(AskTimeout):
        await future
    return asyncio.get_running_loop().time()


def test_each_ask_ends_at_its_own_deadline() -> None:
    async def play() -> None:
        calls = Calls("a")
        timeouts = [5.0, 1.0, 3.0, 1.0, 0.0, 600.0]
        futures = [calls.open_ask("b", "Question", timeout)[1] for timeout in timeouts]
        assert await asyncio.gather(*map(ended_at, futures)) == timeouts
        assert not list(calls.waits())

    run_virtual(play())


def test_an_ask_opened_while_others_wait_ends_in_time() -> None:
    async def play() -> None:
        calls = Calls("a")
        answered, first = calls.open_ask("b", "Question", 4.0)
        await asyncio.sleep(1.0)
        _, second = calls.open_ask("b", "Question", 2.0)
        calls.reply(answered, VersionBurnt(1))
        assert await first == VersionBurnt(1)
        assert await ended_at(second) == 3.0
        _, third = calls.open_ask("b", "Question", 2.0)
        assert await ended_at(third) == 5.0

    run_virtual(play())


def test_an_ask_that_nobody_waits_for_any_more_is_closed_quietly() -> None:
    async def play() -> None:
        calls = Calls("a")
        ask_id, future = calls.open_ask("b", "Question", 1.0)
        future.cancel()
        calls.reply(ask_id, VersionBurnt(1))
        assert calls.num_late_replies == 0
        calls.fail(ask_id, ActorDead("gone"))
        assert calls.num_late_replies == 1

    run_virtual(play())


def test_the_end_of_a_receiver_ends_what_waits_for_it_and_nothing_else() -> None:
    async def play() -> None:
        calls = Calls("a")
        watcher = Inbox("a")
        _, of_b = calls.open_ask("b", "Question", 1.0)
        of_c_id, of_c = calls.open_ask("c", "Question", 1.0)
        calls.watch("b", watcher)
        calls.watch("c", watcher)
        twice = calls.watch("b", watcher)
        calls.end_watch(twice, "actor stopped")
        calls.end_all("b", AuthFailed("another key"))
        with pytest.raises(AuthFailed, match="another key"):
            await of_b
        assert not of_c.done()
        calls.end_watch(twice, "again")
        assert watcher.told == [Down("b", "actor stopped"), Down("b", "another key")]
        calls.reply(of_c_id, VersionBurnt(1))
        assert await of_c == VersionBurnt(1)

    run_virtual(play())
