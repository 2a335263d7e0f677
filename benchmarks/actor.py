"""Ratchet's actor against Pykka's ThreadingActor, in one process and one run.

    python benchmarks/actor.py [rounds]

Rounds are interleaved and medians printed, because the scheduler's noise is larger than most
differences. "loop" is a sender on the actor's own event loop, "thread" one in a plain thread.
Deferred: 1,000 asks that take 50 ms each, 128 in flight; Ratchet defers them in one actor, Pykka
needs 128 actors, each of which sleeps.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pykka
import structlog

from ratchet.actors.actor import Actor, Answer, LocalRef
from ratchet.actors.system import System
from ratchet.messages import Ask, Message

NUM_TELLS = 20_000
NUM_ASKS = 4_000
NUM_DEFERRED = 1_000
IN_FLIGHT = 128
DEFERRED_S = 0.05


class Pong(Message, frozen=True):
    pass


class Ping(Ask[Pong], frozen=True):
    pass


class Note(Message, frozen=True):
    pass


class Wait(Ask[Pong], frozen=True):
    pass


class Ours(Actor[Ping | Note | Wait]):
    def receive(self, message: Ping | Note | Wait) -> Answer:
        match message:
            case Ping():
                return Pong()
            case Note():
                return None
            case Wait():
                return self.spawn(self._wait(), name="wait")

    async def _wait(self) -> Pong:
        await asyncio.sleep(DEFERRED_S)
        return Pong()


class Theirs(pykka.ThreadingActor):
    use_daemon_thread = True

    def on_receive(self, message: Any) -> Any:
        match message:
            case Ping():
                return Pong()
            case Note():
                return None
            case Wait():
                time.sleep(DEFERRED_S)
                return Pong()


def make_system(loop: asyncio.AbstractEventLoop | None = None) -> System:
    ids = itertools.count()
    return System(
        rng=random.Random(0),
        wall_time=time.time,
        new_id=lambda: str(next(ids)),
        log=structlog.get_logger(),
        loop=loop,
    )


@contextmanager
def ours_in_a_thread() -> Iterator[LocalRef]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    ref = Ours.start(make_system(loop), "ours")
    yield ref
    ref.stop()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@contextmanager
def theirs() -> Iterator[Any]:
    ref = Theirs.start()
    yield ref
    ref.stop()


def tells_on_the_loop() -> float:
    async def main() -> float:
        ref = Ours.start(make_system(), "ours")
        begin = time.perf_counter()
        for number in range(NUM_TELLS):
            ref.tell(Note())
            if number % 256 == 0:
                await asyncio.sleep(0)
        await ref.ask(Ping(), block=False)
        return time.perf_counter() - begin

    return NUM_TELLS / asyncio.run(main())


def tells_from_a_thread(started: Callable[[], Any]) -> float:
    with started() as ref:
        begin = time.perf_counter()
        for _ in range(NUM_TELLS):
            ref.tell(Note())
        ref.ask(Ping())
        return NUM_TELLS / (time.perf_counter() - begin)


def asks_on_the_loop() -> float:
    async def main() -> float:
        ref = Ours.start(make_system(), "ours")
        begin = time.perf_counter()
        for _ in range(NUM_ASKS):
            await ref.ask(Ping(), block=False)
        return time.perf_counter() - begin

    return NUM_ASKS / asyncio.run(main())


def asks_from_a_thread(started: Callable[[], Any]) -> float:
    with started() as ref:
        begin = time.perf_counter()
        for _ in range(NUM_ASKS):
            ref.ask(Ping())
        return NUM_ASKS / (time.perf_counter() - begin)


def deferred_ours() -> float:
    async def main() -> float:
        ref = Ours.start(make_system(), "ours")
        free = asyncio.Semaphore(IN_FLIGHT)

        async def one() -> None:
            async with free:
                await ref.ask(Wait(), block=False)

        begin = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(NUM_DEFERRED)))
        return time.perf_counter() - begin

    return asyncio.run(main())


def deferred_theirs() -> float:
    refs = [Theirs.start() for _ in range(IN_FLIGHT)]
    begin = time.perf_counter()
    futures = [refs[number % IN_FLIGHT].ask(Wait(), block=False) for number in range(NUM_DEFERRED)]
    pykka.get_all(futures)
    seconds = time.perf_counter() - begin
    for ref in refs:
        ref.stop()
    return seconds


CASES: list[tuple[str, str, Callable[[], float]]] = [
    ("tells/s", "pykka, thread", lambda: tells_from_a_thread(theirs)),
    ("tells/s", "ratchet, thread", lambda: tells_from_a_thread(ours_in_a_thread)),
    ("tells/s", "ratchet, loop", tells_on_the_loop),
    ("asks/s", "pykka, thread", lambda: asks_from_a_thread(theirs)),
    ("asks/s", "ratchet, thread", lambda: asks_from_a_thread(ours_in_a_thread)),
    ("asks/s", "ratchet, loop", asks_on_the_loop),
    ("deferred, s", "pykka, 128 actors", deferred_theirs),
    ("deferred, s", "ratchet, 1 actor", deferred_ours),
]


def main(rounds: int) -> None:
    results: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for what, who, case in CASES:
            cpu = time.process_time()
            value = case()
            results.setdefault((what, who), []).append((value, time.process_time() - cpu))
    base: dict[str, float] = {}
    for (what, who), values in results.items():
        median = statistics.median(value for value, _ in values)
        cpu = statistics.median(cpu for _, cpu in values)
        base.setdefault(what, median)
        ratio = median / base[what]
        print(f"{what:12} {who:18} {median:12,.2f}   x{ratio:5.2f}   cpu {cpu:5.2f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
