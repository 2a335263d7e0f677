"""A thread for blocking calls that can be left behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ratchet.transport.weights.worker import Worker

_set_policy = getattr(os, "sched_setscheduler", None)


def test_calls_run_in_order_on_one_thread_off_the_loop() -> None:
    async def main() -> None:
        worker = Worker("test-worker")
        seen: list[tuple[int, str]] = []
        calls = [
            worker.run(lambda n=n: seen.append((n, threading.current_thread().name)))
            for n in range(5)
        ]
        await asyncio.gather(*calls)
        assert seen == [(n, "test-worker") for n in range(5)]
        worker.stop(lambda: None)

    asyncio.run(main())


def test_an_error_is_raised_where_it_is_awaited_and_the_thread_goes_on() -> None:
    async def main() -> None:
        worker = Worker("test-worker")
        with pytest.raises(ZeroDivisionError):
            await worker.run(lambda: 1 // 0)
        assert await worker.run(lambda: 3) == 3
        worker.stop(lambda: None)

    asyncio.run(main())


def test_a_cancelled_call_runs_all_the_same() -> None:
    async def main() -> None:
        worker = Worker("test-worker")
        done = threading.Event()
        worker.run(done.set).cancel()
        assert await asyncio.to_thread(done.wait, 5)
        worker.stop(lambda: None)

    asyncio.run(main())


def policy_of_a_worker(policy: int) -> int:
    """Return the policy of a worker that a thread of this one starts."""

    async def main() -> int:
        worker = Worker("test-worker")
        found = await worker.run(lambda: os.sched_getscheduler(0))
        worker.stop(lambda: None)
        return found

    def act() -> int:
        _set_policy(0, policy, os.sched_param(0))  # of this thread
        return asyncio.run(main())

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(act).result()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such policies")
def test_it_puts_nobody_aside_unless_its_process_has_another_policy() -> None:
    before = os.sched_getscheduler(0)
    assert policy_of_a_worker(os.SCHED_OTHER) == os.SCHED_BATCH
    assert policy_of_a_worker(os.SCHED_IDLE) == os.SCHED_IDLE
    assert os.sched_getscheduler(0) == before


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such policies")
def test_where_policies_are_forbidden_it_works_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    assert policy_of_a_worker(os.SCHED_OTHER) == os.SCHED_OTHER


def test_a_result_for_a_closed_loop_is_dropped() -> None:
    go_on, ended = threading.Event(), threading.Event()

    async def main() -> None:
        worker = Worker("test-worker")
        worker.run(lambda: go_on.wait(10))
        worker.stop(ended.set)

    asyncio.run(main())
    go_on.set()
    assert ended.wait(10)


def test_stop_runs_the_last_call_and_ends_the_thread() -> None:
    async def main() -> None:
        worker = Worker("test-worker")
        threads: list[threading.Thread] = []
        done = threading.Event()
        await worker.run(lambda: threads.append(threading.current_thread()))
        worker.stop(done.set)
        await asyncio.to_thread(threads[0].join, 5)
        assert done.is_set()
        assert not threads[0].is_alive()

    asyncio.run(main())


def test_a_worker_without_calls_starts_no_thread() -> None:
    before = threading.active_count()
    Worker("test-worker").stop(lambda: None)
    assert threading.active_count() == before


def test_a_stuck_call_does_not_keep_the_process() -> None:
    code = """
import asyncio, threading
from ratchet.transport.weights.worker import Worker
async def main():
    begun = threading.Event()
    Worker("stuck").run(lambda: (begun.set(), threading.Event().wait()))
    await asyncio.to_thread(begun.wait)
asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_thread_that_was_told_to_end_does_so_before_the_process() -> None:
    code = """
import asyncio, threading, time
from ratchet.transport.weights.worker import Worker
async def main():
    worker, begun = Worker("busy"), threading.Event()
    worker.run(lambda: (begun.set(), time.sleep(0.3)))
    await asyncio.to_thread(begun.wait)
    worker.stop(lambda: print("ended"))
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=60, check=True, capture_output=True, text=True
    )
    assert done.stdout == "ended\n"
