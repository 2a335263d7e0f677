"""Actors reached from plain threads, and what must never block an event loop."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.contract.test_actor_stop import loop_thread
from tests.helpers.actors import make_system

from ratchet.actors.actor import Actor, Answer, LocalRef
from ratchet.actors.reply import Reply
from ratchet.errors import AskTimeout, HandlerFailed
from ratchet.messages import Ask, Message


class Done(Message, frozen=True):
    value: int


class Work(Ask[Done], frozen=True):
    value: int


class Worker(Actor[Work]):
    def receive(self, message: Work) -> Answer:
        match message:
            case Work():
                if message.value < 0:
                    return self.spawn(self._never(), name="never")
                if message.value == 0:
                    raise ValueError("zero")
                return Done(threading.get_ident() if message.value == 1 else message.value)

    async def _never(self) -> Done:
        await asyncio.Event().wait()
        raise AssertionError


def test_blocking_asks_from_several_threads() -> None:
    with loop_thread() as loop, ThreadPoolExecutor(4) as pool:
        ref = Worker.start(make_system(loop=loop), "worker")
        asks = [pool.submit(ref.ask, Work(i), timeout=5) for i in range(2, 100)]
        assert [ask.result() for ask in asks] == [Done(i) for i in range(2, 100)]
        assert ref.ask(Work(1)).value not in {threading.get_ident(), None}
        assert ref.stop()
        assert not ref.stop()


def test_a_blocking_ask_fails_like_any_other() -> None:
    with loop_thread() as loop:
        ref = Worker.start(make_system(loop=loop), "worker")
        with pytest.raises(HandlerFailed, match="ValueError: zero"):
            ref.ask(Work(0))
        with pytest.raises(
            AskTimeout,
            match=r"someone outside the actors asked worker for Work: no reply within 0\.05 s",
        ):
            ref.ask(Work(-1), timeout=0.05)
        ref.stop()


def test_a_future_made_in_a_thread() -> None:
    with loop_thread() as loop:
        system = make_system(loop=loop, ask_timeout_s=5.0)
        ref = Worker.start(system, "worker")
        future = ref.ask(Work(7), block=False)
        assert future.get() == Done(7)
        assert future.get(timeout=0) == Done(7)
        patient = ref.ask(Work(-1), block=False, timeout=0.05)
        with pytest.raises(AskTimeout, match=r"0\.01 s"):
            patient.get(timeout=0.01)  # gives up; the ask itself goes on
        with pytest.raises(AskTimeout, match=r"0\.05 s"):
            patient.get()
        assert system.dead_letters.total == 0
        ref.stop()


def test_a_future_made_in_a_thread_and_awaited_on_a_loop() -> None:
    async def wait(reply: Reply[Done]) -> Done:
        return await reply

    with loop_thread() as loop:
        ref = Worker.start(make_system(loop=loop), "worker")
        assert asyncio.run(wait(ref.ask(Work(7), block=False))) == Done(7)
        with pytest.raises(AskTimeout):
            asyncio.run(wait(ref.ask(Work(-1), block=False, timeout=0.05)))
        ref.stop()


def test_nothing_blocks_a_running_loop() -> None:
    async def main() -> None:
        ref = Worker.start(make_system(), "worker")
        with pytest.raises(RuntimeError, match="pass block=False and await"):
            ref.ask(Work(2))
        with pytest.raises(RuntimeError, match="pass block=False and await"):
            ref.stop()
        assert ref.is_alive()  # nothing was sent
        reply = ref.ask(Work(2), block=False)
        with pytest.raises(RuntimeError, match=r"use `await ref\.ask"):
            reply.get()
        assert await reply == Done(2)
        assert reply.get() == Done(2)  # there is nothing to wait for any more

    asyncio.run(main())


def test_one_loop_asks_an_actor_on_another() -> None:
    async def main(ref: LocalRef) -> None:
        asks = [ref.ask(Work(i), block=False) for i in range(2, 200)]
        assert await asyncio.gather(*asks) == [Done(i) for i in range(2, 200)]
        begin = asyncio.get_running_loop().time()
        with pytest.raises(AskTimeout):
            await ref.ask(Work(-1), block=False, timeout=0.05)
        assert asyncio.get_running_loop().time() - begin >= 0.049
        assert await ref.stop(block=False)

    with loop_thread() as loop:
        asyncio.run(main(Worker.start(make_system(loop=loop), "worker")))


def test_an_asker_whose_loop_is_gone_does_not_disturb_the_actor() -> None:
    async def leave(ref: LocalRef) -> None:
        ref.ask(Work(-1), block=False)

    with loop_thread() as loop:
        ref = Worker.start(make_system(loop=loop), "worker")
        asyncio.run(leave(ref))
        assert ref.stop(timeout=5)


def test_start_needs_a_loop() -> None:
    system = make_system()
    with pytest.raises(
        RuntimeError, match=r"start it from a coroutine, or give System\(loop=...\)"
    ):
        Worker.start(system, "worker")
    loop = asyncio.new_event_loop()
    loop.close()
    closed = make_system(loop=loop)
    with pytest.raises(RuntimeError, match="is closed"):
        Worker.start(closed, "worker")
    assert system.names() == closed.names() == []
