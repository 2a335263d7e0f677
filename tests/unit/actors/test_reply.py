from __future__ import annotations

import asyncio
import threading

import pykka
import pytest
from tests.helpers.actors import make_system
from tests.simulation.loop import run_virtual

from ratchet.actors.reply import Reply
from ratchet.errors import ActorDead, AskTimeout


def test_a_second_outcome_is_counted_and_ignored() -> None:
    async def main() -> None:
        box = make_system().dead_letters
        reply: Reply[int] = Reply("a", "b", "Ping", timeout_s=5, dead_letters=box)
        reply.set(1)
        reply.set(2)
        reply.fail(ActorDead("too late"))
        reply.set_exception()
        assert await reply == 1
        assert box.counts == {
            ("a", "int", "late reply"): 1,
            ("a", "ActorDead", "late reply"): 1,
            ("a", "RuntimeError", "late reply"): 1,
        }

    run_virtual(main())


def test_the_deadline_counts_from_the_ask() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        reply: Reply[int] = Reply("a", "b", "Ping", timeout_s=5)
        await asyncio.sleep(3)
        with pytest.raises(AskTimeout, match=r"^a asked b for Ping: no reply within 5 s$"):
            await reply
        assert loop.time() == 5
        late = Reply[int]("a", "b", "Ping", timeout_s=5)
        await asyncio.sleep(7)
        with pytest.raises(AskTimeout):
            await late
        assert loop.time() == 12

    run_virtual(main())


def test_several_tasks_await_one_reply_and_one_gives_up() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        reply: Reply[int] = Reply("a", "b", "Ping", timeout_s=5)

        async def wait() -> int:
            return await reply

        tasks = [asyncio.create_task(wait()) for _ in range(3)]
        loop.call_later(1, tasks[0].cancel)
        loop.call_later(2, reply.set, 7)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError, int, int]
        assert loop.time() == 2

    run_virtual(main())


def test_a_settled_reply_leaves_no_timer_behind() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        reply: Reply[int] = Reply("a", "b", "Ping", timeout_s=5)
        threads = threading.Thread(target=reply.set, args=(1,))
        threads.start()
        threads.join()
        assert await reply == 1
        await asyncio.sleep(0)
        assert all(handle.cancelled() for handle in loop._scheduled)  # type: ignore[attr-defined]

    asyncio.run(main())


def test_pykka_derived_values_work_from_threads_and_refuse_to_be_awaited() -> None:
    reply: Reply[int] = Reply("a", "b", "Ping", timeout_s=5)
    doubled = reply.map(lambda value: value * 2)
    reply.set(4)
    assert doubled.get(timeout=1) == 8
    assert pykka.get_all([reply, doubled], timeout=1) == [4, 8]

    async def main() -> None:
        with pytest.raises(RuntimeError, match="await the ask, then map its value"):
            await doubled

    asyncio.run(main())


def test_set_exception_takes_the_error_in_hand() -> None:
    reply: Reply[int] = Reply()
    try:
        raise ValueError("boom")
    except ValueError:
        reply.set_exception()
    with pytest.raises(ValueError, match="boom"):
        reply.get()
