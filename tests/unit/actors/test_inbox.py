from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Any

import pytest
from tests.helpers.actors import make_system
from tests.simulation.loop import VirtualLoop, run_virtual

from ratchet.actors.inbox import Envelope, Inbox
from ratchet.actors.reply import Reply
from ratchet.errors import ActorDead


def told(message: Any) -> Envelope:
    return Envelope(message, None, None, "sender")


def test_envelopes_come_out_in_order() -> None:
    async def main() -> None:
        inbox = Inbox("a", asyncio.get_running_loop(), make_system().dead_letters)
        for message in "abc":
            inbox.put(told(message))
        await inbox.wait()
        assert [inbox.get().message for _ in range(3)] == ["a", "b", "c"]
        assert inbox.empty()
        with pytest.raises(IndexError):
            inbox.get()

    asyncio.run(main())


def test_one_wake_up_per_burst() -> None:
    loop = VirtualLoop()
    calls: list[Any] = []
    threadsafe = loop.call_soon_threadsafe

    def counted(callback: Any, *args: Any, **kwargs: Any) -> asyncio.Handle:
        calls.append(callback)
        return threadsafe(callback, *args, **kwargs)

    loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
    inbox = Inbox("a", loop, make_system().dead_letters)
    waiting = loop.create_task(inbox.wait())
    loop.call_soon(loop.stop)
    loop.run_forever()
    for message in range(1000):
        inbox.put(told(message))  # from outside of the loop
    assert len(calls) == 1
    loop.run_until_complete(waiting)
    loop.close()


def test_close_answers_what_is_left_and_what_comes_later() -> None:
    async def main() -> None:
        system = make_system()
        inbox = Inbox("a", asyncio.get_running_loop(), system.dead_letters)
        replies = [Reply[Any](None, "a", "str") for _ in range(2)]
        inbox.put(told("1"))
        inbox.put(Envelope("2", replies[0], None, None))
        inbox.close()
        inbox.put(told("3"))
        inbox.put(Envelope("4", replies[1], None, None))
        inbox.close()
        assert system.dead_letters.counts == {("a", "str", "actor stopped"): 2}
        for reply in replies:
            with pytest.raises(ActorDead, match="a stopped before it handled str"):
                await reply
        assert inbox.closed
        assert inbox.empty()

    asyncio.run(main())


def test_a_close_in_the_middle_of_a_put_loses_nothing() -> None:
    """The check for closed and the append are one step: nothing slips in behind a close."""
    system = make_system()
    loop = asyncio.new_event_loop()
    inbox = Inbox("a", loop, system.dead_letters)
    closer = threading.Thread(target=inbox.close)

    class Slow(deque[Envelope]):
        def append(self, envelope: Envelope) -> None:
            closer.start()
            closer.join(timeout=0.2)  # it can only end now if nothing holds it back
            super().append(envelope)

    inbox._queue = Slow()
    inbox.put(told("x"))
    closer.join()
    loop.close()
    assert inbox.closed
    assert inbox.empty()
    assert system.dead_letters.total == 1


def test_the_end_is_told_once_and_only_the_first_reason_counts() -> None:
    async def main() -> None:
        inbox = Inbox("a", asyncio.get_running_loop(), make_system().dead_letters)
        heard: list[str] = []
        assert inbox.at_end("one", heard.append)
        assert inbox.at_end("one", heard.append)
        assert inbox.at_end("two", heard.append)
        assert inbox.end_reason is None
        inbox.end("first")
        inbox.end("second")
        assert heard == ["first", "first"]
        assert inbox.end_reason == "first"
        assert not inbox.at_end("three", heard.append)
        assert len(heard) == 2

    run_virtual(main())
