"""How an actor fails: in start, tell, ask, child task, stop, and by an interrupt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.helpers.actors import RecordingLog, Witness, make_system

from ratchet.actors.actor import Actor, Answer, LocalRef
from ratchet.actors.system import System
from ratchet.errors import ActorDead, HandlerFailed, StaleTerm
from ratchet.messages import Ask, Message


class Done(Message, frozen=True):
    pass


class Try(Ask[Done], frozen=True):
    where: str


class Do(Message, frozen=True):
    where: str


def boom() -> None:
    raise ValueError("boom")


class Fragile(Actor[Try | Do]):
    def __init__(self, system: System, name: str, where: str = "", how: Any = boom) -> None:
        super().__init__(system, name)
        self.where = where
        self.how: Callable[[], None] = how
        self.events: list[str] = []
        self.child: asyncio.Task[Done] | None = None

    def receive(self, message: Try | Do) -> Answer:
        match message:
            case Try() | Do():
                pass
        match message.where:
            case "handler":
                self.how()
            case "child":
                return self.spawn(self._child(), name="child")
            case "unspawned":
                return self._child()
            case "shared":
                self.child = self.child or self.spawn(self._child(), name="child")
                return self.child
            case "cancelled":
                task = self.spawn(self._child(), name="child")
                task.cancel()
                return task
            case "none":
                return None
        return Done()

    async def _child(self) -> Done:
        await asyncio.sleep(0)
        self.how()
        return Done()

    def on_start(self) -> None:
        if self.where == "start":
            self.how()

    async def on_stop(self) -> None:
        self.events.append("on_stop")
        if self.where == "stop":
            self.how()

    def on_failure(self, exception_type: Any, exception_value: Any, traceback: Any) -> None:
        assert traceback is not None
        self.events.append(f"{exception_type.__name__}: {exception_value}")
        if self.where == "on_failure":
            raise RuntimeError("again")

    async def release(self) -> None:
        self.events.append("release")
        if self.where == "release":
            raise RuntimeError("again")
        if self.where == "hang":
            await asyncio.Event().wait()


async def start(system: System, *args: Any) -> tuple[LocalRef, Fragile, asyncio.Queue[Any]]:
    heard: asyncio.Queue[Any] = asyncio.Queue()
    actors: list[Fragile] = []

    class Known(Fragile):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            actors.append(self)

    ref = Known.start(system, "fragile", *args)
    ref.watch(Witness.start(system, "witness", heard))
    return ref, actors[0], heard


def log_of(system: System) -> RecordingLog:
    assert isinstance(system.log, RecordingLog)
    return system.log


async def fails(ref: LocalRef, actor: Fragile, heard: asyncio.Queue[Any]) -> None:
    """The actor fails with ValueError("boom"), and everyone hears of it."""
    async with asyncio.timeout(5):
        assert await heard.get() == ("fragile", "ValueError: boom")
    assert actor.events == ["ValueError: boom", "release"]
    assert not ref.is_alive()
    (event,) = log_of(actor.system).named("actor_failed")
    assert isinstance(event["exc_info"], ValueError)
    assert event["actor"] == "fragile"
    with pytest.raises(ActorDead):
        await ref.ask(Try("ok"), block=False)
    assert heard.empty()


def test_in_start() -> None:
    async def main() -> None:
        ref, actor, heard = await start(make_system(), "start")
        queued = ref.ask(Try("ok"), block=False)
        await fails(ref, actor, heard)
        with pytest.raises(ActorDead):
            await queued

    asyncio.run(main())


@pytest.mark.parametrize("where", ["handler", "child", "unspawned"])
def test_in_a_tell(where: str) -> None:
    async def main() -> None:
        ref, actor, heard = await start(make_system())
        ref.tell(Do(where))
        await fails(ref, actor, heard)

    asyncio.run(main())


@pytest.mark.parametrize("where", ["handler", "child", "unspawned"])
def test_in_an_ask_the_asker_has_it_and_the_actor_lives(where: str) -> None:
    async def main() -> None:
        system = make_system()
        ref, actor, heard = await start(system)
        with pytest.raises(HandlerFailed, match="fragile failed at Try: ValueError: boom") as info:
            await ref.ask(Try(where), block=False)
        assert isinstance(info.value.__cause__, ValueError)
        assert await ref.ask(Try("ok"), block=False) == Done()
        (event,) = log_of(system).named("handler_failed")
        assert event["exc_info"] is info.value.__cause__
        assert event["exc_info"].__traceback__ is not None
        assert actor.events == []
        assert heard.empty()

    asyncio.run(main())


@pytest.mark.parametrize("where", ["handler", "child", "unspawned"])
def test_an_error_on_purpose_reaches_the_asker_as_it_is(where: str) -> None:
    async def main() -> None:
        system = make_system()
        error = StaleTerm("fenced")

        def refuse() -> None:
            raise error

        ref, _, _ = await start(system, "", refuse)
        with pytest.raises(StaleTerm) as info:
            await ref.ask(Try(where), block=False)
        assert info.value is error
        assert log_of(system).named("handler_failed") == []

    asyncio.run(main())


def test_one_child_that_answers_two_asks() -> None:
    async def main() -> None:
        ref, actor, _ = await start(make_system())
        asks = [ref.ask(Try("shared"), block=False) for _ in range(2)]
        outcomes = await asyncio.gather(*asks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [HandlerFailed] * 2
        assert ref.is_alive()
        assert actor.events == []

    asyncio.run(main())


def test_an_answer_that_was_cancelled_ends_the_ask() -> None:
    async def main() -> None:
        ref, _, _ = await start(make_system())
        with pytest.raises(HandlerFailed, match="cancelled"):
            await ref.ask(Try("cancelled"), block=False)
        assert await ref.ask(Try("ok"), block=False) == Done()

    asyncio.run(main())


def test_an_ask_without_an_answer_is_an_error() -> None:
    async def main() -> None:
        ref, _, _ = await start(make_system())
        with pytest.raises(HandlerFailed, match="fragile has no reply to Try"):
            await ref.ask(Try("none"), block=False)
        assert ref.is_alive()

    asyncio.run(main())


def test_in_stop() -> None:
    async def main() -> None:
        ref, actor, heard = await start(make_system(), "stop")
        assert await ref.stop(block=False)
        assert await heard.get() == ("fragile", "ValueError: boom")
        assert actor.events == ["on_stop", "ValueError: boom", "release"]

    asyncio.run(main())


@pytest.mark.parametrize(("where", "error"), [("release", RuntimeError), ("hang", TimeoutError)])
def test_to_let_go_after_a_failure_may_fail_or_hang(where: str, error: type[Exception]) -> None:
    async def main() -> None:
        system = make_system(ask_timeout_s=0.1)
        ref, actor, heard = await start(system, where)
        ref.tell(Do("handler"))
        async with asyncio.timeout(5):
            assert await heard.get() == ("fragile", "ValueError: boom")
        assert actor.events == ["ValueError: boom", "release"]
        (event,) = log_of(system).named("release_failed")
        assert isinstance(event["exc_info"], error)

    asyncio.run(main())


def test_a_stop_lets_go_last() -> None:
    async def main() -> None:
        ref, actor, _ = await start(make_system())
        assert await ref.stop(block=False)
        assert actor.events == ["on_stop", "release"]

    asyncio.run(main())


def test_in_on_failure_itself_the_first_reason_counts() -> None:
    async def main() -> None:
        system = make_system()
        ref, _, heard = await start(system, "on_failure")
        ref.tell(Do("handler"))
        assert await heard.get() == ("fragile", "ValueError: boom")
        (event,) = log_of(system).named("on_failure_failed")
        assert isinstance(event["exc_info"], RuntimeError)

    asyncio.run(main())


def test_in_the_constructor_it_reaches_the_starter() -> None:
    class Unborn(Fragile):
        def __init__(self, system: System) -> None:
            super().__init__(system, "unborn")
            raise ValueError("boom")

    async def main() -> None:
        system = make_system()
        with pytest.raises(ValueError, match="boom"):
            Unborn.start(system)
        assert system.names() == []

    asyncio.run(main())


def test_a_handler_that_meets_a_cancelled_task_fails_and_is_not_cancelled() -> None:
    async def main() -> None:
        def look() -> None:
            raise asyncio.CancelledError

        system = make_system()
        ref, actor, heard = await start(system, "", look)
        with pytest.raises(HandlerFailed, match="CancelledError"):
            await ref.ask(Try("handler"), block=False)
        assert ref.is_alive()
        ref.tell(Do("handler"))
        assert await heard.get() == ("fragile", "CancelledError: ")
        assert actor.events == ["CancelledError: ", "release"]

    asyncio.run(main())


@pytest.mark.parametrize("message", [Try("handler"), Do("handler"), Do("child")])
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_not_swallowed(message: Any, interrupt: type[BaseException]) -> None:
    def strike() -> None:
        raise interrupt

    told: list[tuple[str, str]] = []

    class Ears:
        name = "ears"

        def tell(self, message: Any) -> None:
            told.append((message.name, message.reason))

    outcomes: list[Any] = []

    async def main() -> None:
        ref, _, _ = await start(make_system(), "", strike)
        ref.watch(Ears())
        if isinstance(message, Ask):
            reply = ref.ask(message, block=False)
            reply_task = asyncio.ensure_future(reply)
            reply_task.add_done_callback(lambda task: outcomes.append(task.exception()))
        else:
            ref.tell(message)
        await asyncio.sleep(5)

    with pytest.raises(interrupt):
        asyncio.run(main())
    assert [name for name, _ in told] == ["fragile"]
    if isinstance(message, Ask):
        assert told == [("fragile", f"{interrupt.__name__}: ")]
