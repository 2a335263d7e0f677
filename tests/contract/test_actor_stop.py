"""How an actor ends: every ask ends, every tell is accounted for, and everyone hears of it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pykka
import pytest
from tests.helpers.actors import RecordingLog, Witness, make_system
from tests.simulation.loop import run_virtual

from ratchet.actors.actor import Actor, Answer, LocalRef
from ratchet.actors.reply import Reply
from ratchet.actors.system import System
from ratchet.errors import ActorDead
from ratchet.messages import Ask, Message


class Done(Message, frozen=True):
    value: int


class Work(Ask[Done], frozen=True):
    value: int


class Sleep(Ask[Done], frozen=True):
    seconds: float


class Note(Message, frozen=True):
    value: int


class Worker(Actor[Work | Sleep | Note]):
    def __init__(
        self, system: System, name: str = "worker", events: list[Any] | None = None
    ) -> None:
        super().__init__(system, name)
        self.events: list[Any] = [] if events is None else events

    def receive(self, message: Work | Sleep | Note) -> Answer:
        match message:
            case Work():
                self.events.append(message.value)
                return Done(message.value)
            case Sleep():
                return self.spawn(self._sleep(message.seconds), name="sleep")
            case Note():
                self.events.append(message.value)
        return None

    async def _sleep(self, seconds: float) -> Done:
        try:
            await asyncio.sleep(seconds)
        finally:
            self.events.append("child ended")
        return Done(0)

    async def on_stop(self) -> None:
        await asyncio.sleep(0)
        self.events.append("on_stop")


@contextmanager
def loop_thread() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


NUM_STOPS = 300
NUM_THREADS = 3


def test_every_ask_and_tell_ends_when_threads_race_a_stop() -> None:
    """300 actors are stopped, each while three threads send to it as fast as they can."""
    asks: list[Reply[Done]] = []
    handled: list[Any] = []
    num_tells = 0
    refs: list[LocalRef] = []
    barrier = threading.Barrier(NUM_THREADS + 1)

    def send() -> tuple[list[Reply[Done]], int]:
        mine, tells = [], 0
        for index in range(NUM_STOPS):
            barrier.wait()
            ref = refs[index]
            for _ in range(20):
                mine.append(ref.ask(Work(1), block=False, timeout=5.0))
                ref.tell(Note(2))
                tells += 1
        return mine, tells

    results: list[tuple[list[Reply[Done]], int]] = []
    threads = [threading.Thread(target=lambda: results.append(send())) for _ in range(NUM_THREADS)]
    interval = sys.getswitchinterval()
    with loop_thread() as loop:
        system = make_system(loop=loop)
        for thread in threads:
            thread.start()
        sys.setswitchinterval(1e-5)
        try:
            for index in range(NUM_STOPS):
                refs.append(Worker.start(system, f"worker-{index}", handled))
                barrier.wait()
                assert refs[-1].stop(timeout=5.0)
        finally:
            sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
        for mine, tells in results:
            asks += mine
            num_tells += tells
        outcomes = Counter(outcome(reply) for reply in asks)

    assert set(outcomes) == {"Done", "ActorDead"}  # no AskTimeout
    assert outcomes.total() == len(asks) == num_tells == NUM_STOPS * NUM_THREADS * 20
    counts = Counter(handled)
    assert counts["on_stop"] == NUM_STOPS
    assert counts[1] == outcomes["Done"]
    assert counts[2] + system.dead_letters.total == num_tells


def outcome(reply: Reply[Done]) -> str:
    try:
        return type(reply.get()).__name__
    except Exception as error:  # noqa: BLE001 - it is counted, whatever it is
        return type(error).__name__


def test_stop_handles_what_is_queued_then_ends_children_then_runs_on_stop() -> None:
    async def main() -> None:
        events: list[Any] = []
        system = make_system()
        ref = Worker.start(system, "worker", events)
        sleeping = ref.ask(Sleep(1e6), block=False)
        await ref.ask(Work(0), block=False)
        for value in range(1, 4):
            ref.tell(Note(value))
        stop = ref.stop(block=False)
        ref.tell(Note(4))
        assert await stop is True
        assert events == [0, 1, 2, 3, "child ended", "on_stop"]
        with pytest.raises(ActorDead, match="worker stopped before it had the reply"):
            await sleeping
        assert system.dead_letters.counts == {("worker", "Note", "actor stopped"): 1}
        assert not ref.is_alive()
        assert system.names() == []
        assert ref not in pykka.ActorRegistry.get_all()

    asyncio.run(main())


def test_stop_is_idempotent() -> None:
    async def main() -> None:
        events: list[Any] = []
        ref = Worker.start(make_system(), "worker", events)
        stops = [ref.stop(block=False) for _ in range(3)]
        assert await asyncio.gather(*stops) == [True, True, True]
        assert await ref.stop(block=False) is False
        assert events == ["on_stop"]

    asyncio.run(main())


def test_a_stop_while_it_is_ending_waits_for_the_end() -> None:
    class Slow(Actor[Note]):
        def receive(self, message: Note) -> None:
            match message:
                case Note():
                    pass

        async def on_stop(self) -> None:
            await asyncio.sleep(5)

    async def main() -> None:
        ref = Slow.start(make_system(), "slow")
        first = ref.stop(block=False)
        await asyncio.sleep(1)
        assert not ref.is_alive()
        assert await ref.stop(block=False) is True
        assert asyncio.get_running_loop().time() == 5
        assert await first is True

    run_virtual(main())


def test_a_child_that_ignores_its_cancellation_does_not_hold_the_end_up() -> None:
    class Stubborn(Actor[Note]):
        def receive(self, message: Note) -> None:
            match message:
                case Note():
                    self.spawn(self._stay(), name="stay")

        async def _stay(self) -> None:
            for _ in range(2):
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(100)

    async def main() -> None:
        system = make_system(ask_timeout_s=3.0)
        ref = Stubborn.start(system, "stubborn")
        ref.tell(Note(0))
        await asyncio.sleep(0.5)
        assert await ref.stop(block=False, timeout=10)
        assert asyncio.get_running_loop().time() == 3.5
        assert isinstance(system.log, RecordingLog)
        (event,) = system.log.named("child_ignores_cancellation")
        assert event["child"] == "stubborn.stay"
        await asyncio.sleep(200)

    run_virtual(main())


def test_watchers_are_told_once_each() -> None:
    async def main() -> None:
        heard: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        system = make_system()
        ref = Worker.start(system)
        witnesses = [Witness.start(system, f"witness-{i}", heard) for i in range(3)]
        for witness in [*witnesses, *witnesses]:
            ref.watch(witness)
        await ref.stop(block=False)
        assert [await heard.get() for _ in range(3)] == [("worker", "stopped")] * 3
        ref.watch(witnesses[0])
        assert await heard.get() == ("worker", "stopped")
        for witness in witnesses:
            await witness.stop(block=False)
        assert heard.empty()

    asyncio.run(main())


def test_a_name_is_free_again_after_the_end_and_a_named_ref_finds_the_new_life() -> None:
    async def main() -> None:
        system = make_system()
        first = Worker.start(system)
        named = system.ref("worker")
        await first.stop(block=False)
        with pytest.raises(ActorDead, match="no actor worker"):
            await named.ask(Work(1), block=False)
        second = Worker.start(system)
        assert second.actor_urn != first.actor_urn
        assert await named.ask(Work(2), block=False) == Done(2)
        with pytest.raises(ActorDead):
            await first.ask(Work(3), block=False)

    asyncio.run(main())


def test_abort_ends_everything_at_once() -> None:
    async def main() -> None:
        heard: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        dying, alive = make_system(), make_system()
        events: list[Any] = []
        ref = Worker.start(dying, "worker", events)
        ref.watch(Witness.start(alive, "witness", heard))
        sleeping = ref.ask(Sleep(1e6), block=False)
        await ref.ask(Work(0), block=False)
        queued = ref.ask(Work(1), block=False)
        dying.abort()
        for reply in (sleeping, queued):
            with pytest.raises(ActorDead):
                await reply
        assert await heard.get() == ("worker", "cancelled")
        assert events == [0, "child ended"]

    asyncio.run(main())


def test_an_actor_whose_loop_ends_before_it_began_still_ends() -> None:
    system = make_system()
    refs = []

    async def main() -> None:
        refs.append(Worker.start(system))

    asyncio.run(main())
    (ref,) = refs
    assert not ref.is_alive()
    with pytest.raises(ActorDead):
        ref.ask(Work(1), timeout=5)


def test_an_actor_whose_loop_is_closed_under_it_is_dead_to_senders() -> None:
    heard: list[tuple[str, str]] = []

    class Ears:
        name = "ears"

        def tell(self, message: Any) -> None:
            heard.append((message.name, message.reason))

    loop = asyncio.new_event_loop()
    system = make_system(loop=loop)
    ref = Worker.start(system)
    ref.watch(Ears())
    loop.run_until_complete(asyncio.sleep(0))
    tasks = asyncio.all_tasks(loop)
    loop.close()
    with pytest.raises(ActorDead):
        ref.ask(Work(1), timeout=5)
    ref.tell(Note(1))
    assert heard == [("worker", "its event loop is closed")]
    assert system.dead_letters.total == 1
    assert not ref.is_alive()
    pykka.ActorRegistry.unregister(ref)  # nothing ran that could have done it
    for task in tasks:  # asyncio would complain that it was destroyed while pending
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        task.get_coro().close()  # type: ignore[union-attr]
