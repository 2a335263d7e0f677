"""Threads on virtual time: the product's blocking code runs as it is, on the loop.

Each thread is a greenlet. Where the product would block (an event, a condition, a queue), it goes
back to the loop, and a callback of its own process goes on with it: so a thread stands still with a
process that is stopped, dies with it, and runs in an order that the seed decides. One runs at a
time, and only gives way where it blocks, so that conditions need no lock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from greenlet import GreenletExit, getcurrent, greenlet
from tests.simulation.loop import Process, VirtualLoop, current_process

T = TypeVar("T")


def running_loop() -> VirtualLoop:
    """The loop of this simulation."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def now() -> float:
    """Seconds by the clock of the process that asks."""
    return running_loop().time()


class Thread:
    """What the product uses of `threading.Thread`."""

    def __init__(self, *, target: Callable[[], object], name: str, daemon: bool) -> None:
        assert daemon
        self.name = name
        self._target = target

    def start(self) -> None:
        """Begin soon, in the process that asks."""
        loop = running_loop()
        process = current_process.get()
        hub = getcurrent()
        while hub.parent is not None:
            hub = hub.parent
        thread = greenlet(self._run, hub)
        thread.gr_context = Process.context(process) if process else None
        thread.thread = self
        loop.threads[thread] = None
        loop.call_in(process, 0.0, thread.switch)

    def join(self, timeout: float) -> None:
        """Never waits: a thread ends with its world at the latest."""

    def _run(self) -> None:
        loop = running_loop()
        try:
            self._target()
        finally:
            loop.threads.pop(getcurrent(), None)


def current_thread() -> Any:
    """The thread that asks."""
    return getattr(getcurrent(), "thread", None)


def end_all(loop: VirtualLoop) -> None:
    """Let no thread of a loop that is closed go on."""
    while loop.threads:
        thread, _ = loop.threads.popitem()
        if thread:
            thread.throw(GreenletExit)


class Waiters:
    """Threads that wait for one thing."""

    def __init__(self) -> None:
        self._parked: deque[_Parked] = deque()

    def park(self, timeout: float | None = None) -> bool:
        """Block until a wake; False if the timeout comes first."""
        parked = _Parked()
        self._parked.append(parked)
        try:
            return parked.wait(timeout)
        finally:
            if parked in self._parked:
                self._parked.remove(parked)

    def wake(self, most: int | None = None) -> None:
        """Let all go on, or so many."""
        while self._parked and most != 0:
            self._parked.popleft().wake()
            most = None if most is None else most - 1


class _Parked:
    def __init__(self) -> None:
        self._thread = getcurrent()
        assert self._thread.parent is not None, "the event loop may not block"
        self._process = current_process.get()
        self._done = False

    def wait(self, timeout: float | None) -> bool:
        if self._thread not in _threads():
            raise GreenletExit
        loop = running_loop()
        timer = None if timeout is None else loop.call_later(max(timeout, 0.0), self._late)
        try:
            woken: bool = self._thread.parent.switch()
        finally:
            if timer is not None:
                timer.cancel()
        return woken

    def wake(self) -> None:
        if not self._done and self._thread in _threads():
            self._done = True
            running_loop().call_in(self._process, 0.0, self._thread.switch, True)

    def _late(self) -> None:
        if not self._done:
            self._done = True
            self._thread.switch(False)


def _threads() -> dict[Any, None]:
    try:
        return running_loop().threads
    except RuntimeError:  # the world is over
        return {}


def sleep(seconds: float) -> None:
    """Block for so long."""
    Waiters().park(seconds)


class Event:
    """As `threading.Event`."""

    def __init__(self) -> None:
        self._set = False
        self._waiters = Waiters()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._waiters.wake()

    def wait(self, timeout: float | None = None) -> bool:
        return self._set or self._waiters.park(timeout) or self._set


class Condition:
    """As `threading.Condition`."""

    def __init__(self) -> None:
        self._waiters = Waiters()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def notify_all(self) -> None:
        self._waiters.wake()

    def wait(self, timeout: float | None = None) -> bool:
        return self._waiters.park(timeout)

    def wait_for(self, holds: Callable[[], T], timeout: float | None = None) -> T:
        until = None if timeout is None else now() + timeout
        while not (result := holds()):
            left_s = None if until is None else until - now()
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return result


class Semaphore:
    """As `threading.Semaphore`."""

    def __init__(self, value: int = 1) -> None:
        self._value = value
        self._changed = Condition()

    def acquire(self, timeout: float | None = None) -> bool:
        if not self._changed.wait_for(lambda: self._value > 0, timeout):
            return False
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        self._value += n
        self._changed.notify_all()


class SimpleQueue:
    """As `queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._changed = Condition()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._changed.notify_all()

    def get(self) -> Any:
        self._changed.wait_for(lambda: bool(self._items))
        return self._items.popleft()


async def to_thread(call: Callable[..., T], *args: Any) -> T:
    """As `asyncio.to_thread`, for calls that do not block: others run meanwhile."""
    await asyncio.sleep(0)
    return call(*args)
