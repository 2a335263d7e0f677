"""The product's threads on virtual time: they block, are stopped and die with their process."""

from __future__ import annotations

import asyncio

from tests.simulation import threads
from tests.simulation.loop import Process, VirtualLoop, run_virtual


def test_a_thread_blocks_in_virtual_time_and_stands_still_with_its_process() -> None:
    seen: list[tuple[str, float]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        event = threads.Event()
        queue = threads.SimpleQueue()

        def work() -> None:
            seen.append((queue.get(), loop.now))
            assert not event.wait(2.0)
            seen.append(("late", loop.now))
            assert event.wait()
            seen.append(("set", loop.now))
            threads.sleep(1.0)

        process = Process("a")
        process.call(threads.Thread(target=work, name="worker", daemon=True).start)
        await asyncio.sleep(1.0)
        queue.put("job")
        await asyncio.sleep(3.0)
        process.stop(loop)
        event.set()
        await asyncio.sleep(5.0)
        process.go_on(loop)
        await asyncio.sleep(0.5)
        process.die(loop)
        await asyncio.sleep(5.0)
        assert len(loop.threads) == 1
        loop.at_close.append(lambda: threads.end_all(loop))

    run_virtual(main())
    assert seen == [("job", 1.0), ("late", 3.0), ("set", 9.0)]


def test_a_condition_waits_no_longer_than_it_may() -> None:
    async def main() -> tuple[bool, bool, float]:
        loop = asyncio.get_running_loop()
        room = threads.Semaphore(1)
        got: list[bool] = []

        def work() -> None:
            got.extend((room.acquire(timeout=1.0), room.acquire(timeout=1.0)))

        threads.Thread(target=work, name="worker", daemon=True).start()
        await asyncio.sleep(5.0)
        return got[0], got[1], loop.time()

    assert run_virtual(main()) == (True, False, 5.0)
