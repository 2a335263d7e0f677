from __future__ import annotations

import asyncio
import math
import random
import time

import pytest
from tests.simulation.loop import Deadlock, Process, VirtualLoop, run_virtual


def test_time_jumps_to_the_next_timer() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        times = [loop.time()]
        for delay in (3600.0, 0.25, 7 * 24 * 3600.0):
            await asyncio.sleep(delay)
            times.append(loop.time())
        return times

    begin = time.monotonic()
    assert run_virtual(main()) == [0.0, 3600.0, 3600.25, 3600.25 + 7 * 24 * 3600]
    assert time.monotonic() - begin < 60


def test_timers_fire_in_order_at_their_times() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        rng = random.Random(0)
        fired: list[tuple[float, float]] = []
        whens = [rng.uniform(0, 1e6) for _ in range(1000)]
        for when in whens:
            loop.call_at(when, lambda when=when: fired.append((when, loop.time())))
        await asyncio.sleep(1e6 + 1)
        assert [when for when, _ in fired] == sorted(whens)
        assert all(abs(when - now) <= 1e-9 for when, now in fired)  # asyncio's clock resolution

    run_virtual(main())


def test_a_timeout_ends_a_wait() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        assert asyncio.get_running_loop().time() == 30

    run_virtual(main())


def test_nothing_left_to_happen_is_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.sleep(5)
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match=r"^at 5 s nothing can happen any more\npending: Task-\d+$"):
        run_virtual(main())
    with pytest.raises(Deadlock, match="a waits on b"):
        run_virtual(main(), explain=lambda: "a waits on b")


def test_call_soon_threadsafe_is_heard_before_time_jumps() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        event = asyncio.Event()
        loop.call_later(1, lambda: loop.call_soon_threadsafe(event.set))
        loop.call_later(100, lambda: None)
        await event.wait()
        return loop.time()

    assert run_virtual(main()) == 1.0


def test_a_call_from_outside_is_heard_before_a_deadlock() -> None:
    loop = VirtualLoop()
    future = loop.create_future()
    loop.call_soon_threadsafe(future.set_result, 7)
    assert loop.run_until_complete(future) == 7
    loop.close()


def test_the_same_program_takes_the_same_course() -> None:
    async def main() -> list[tuple[float, int]]:
        loop = asyncio.get_running_loop()
        rng = random.Random(3)
        course: list[tuple[float, int]] = []

        async def walk(number: int) -> None:
            for _ in range(20):
                await asyncio.sleep(rng.choice([0, 0.5, rng.random()]))
                course.append((loop.time(), number))

        await asyncio.gather(*(walk(number) for number in range(20)))
        return course

    assert run_virtual(main()) == run_virtual(main())


def test_what_is_left_at_the_end_is_cancelled_in_the_order_in_which_it_began() -> None:
    cancelled: list[int] = []

    async def linger(number: int) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.append(number)

    async def main() -> None:
        main.left = [asyncio.create_task(linger(number)) for number in range(20)]  # type: ignore[attr-defined]
        await asyncio.sleep(1)

    run_virtual(main())
    assert cancelled == list(range(20))


def test_who_would_die_while_the_rest_is_cancelled_ends_as_well() -> None:
    """A process dies with its actor, which is cancelled at the end; its other tasks would wait."""
    ended: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        process = Process("p")

        async def actor() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                process.die(loop)
                ended.append("actor")

        async def parent() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(asyncio.sleep(3600))
            finally:
                ended.append("parent")

        tasks = [process.call(asyncio.ensure_future, each()) for each in (actor, parent)]
        await asyncio.wait(tasks, timeout=1)

    run_virtual(main())
    assert ended == ["actor", "parent"]


def test_the_shortest_wait_lets_time_go_on() -> None:
    """Else who is woken a nanosecond early waits for ever for a rest too small for a float."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        await asyncio.sleep(12345.678)
        begin = loop.now
        process = Process("p", offset=0.1, rate=1.0001)

        async def wait_a_moment() -> None:
            woken = loop.create_future()
            loop.call_at(math.nextafter(loop.time(), math.inf), woken.set_result, None)
            await woken

        for _ in range(10):
            await wait_a_moment()
            await asyncio.ensure_future(process.call(wait_a_moment))
        assert begin + 19e-9 < loop.now < begin + 1e-6

    run_virtual(main())
