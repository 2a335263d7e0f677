"""The contract of `Ref`, as tests that run on every implementation of it.

To run it on an implementation, subclass `RefSuite` as `Test...` and write `stage`: an async context
manager that yields a `Stage`. Only messages of `ratchet.messages` travel, so that it also runs over
a link. `reason` of a message tells the target what to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Any, assert_never

import pytest
from tests.helpers.actors import Witness

from ratchet.actors.actor import Actor, Answer
from ratchet.actors.system import System
from ratchet.errors import ActorDead, AskTimeout, HandlerFailed, StaleTerm
from ratchet.messages import AbortLoad, BurnVersion, VersionBurnt
from ratchet.transport.mailbox.base import Ref, Trace, current_trace

PATIENCE_S = 20.0


@dataclass
class Stage:
    """Two sides, which may be one and the same."""

    caller: System
    """where the test runs"""
    target: System
    """where the actor runs"""
    start: Callable[[type[Actor[Any]], str], Awaitable[Ref]]
    """starts an actor class under a name on the target's side; returns the caller's ref to it"""


class Target(Actor[BurnVersion | AbortLoad]):
    """Does as it is told."""

    def __init__(self, system: System, name: str) -> None:
        super().__init__(system, name)
        self.seen: list[int] = []

    def receive(self, message: BurnVersion | AbortLoad) -> Answer:
        match message:
            case AbortLoad():
                return self._told(message)
            case BurnVersion():
                return self._asked(message)
            case _:
                assert_never(message)

    def _told(self, message: AbortLoad) -> None:
        match message.reason:
            case "crash":
                raise ValueError("boom")
            case "stop":
                self.stop()
            case _:
                self.seen.append(message.version)

    def _asked(self, message: BurnVersion) -> Answer:
        match message.reason:
            case "echo":
                return VersionBurnt(message.version)
            case "hang":
                return self.spawn(self._hang(), name="hang")
            case "slow":
                return self.spawn(self._slow(message.version), name="slow")
            case "refuse":
                raise StaleTerm("term 1 is fenced by term 2")
            case "crash":
                raise ValueError("boom")
            case "seen":
                return VersionBurnt(len(self.seen) if self.seen == sorted(self.seen) else -1)
            case "trace":
                trace = current_trace.get()
                assert trace is not None
                assert trace.trace_id == "t-1"
                return VersionBurnt(trace.version if trace.version is not None else -1)
            case _:
                raise AssertionError(message)

    async def _hang(self) -> VersionBurnt:
        await asyncio.Event().wait()
        raise AssertionError

    async def _slow(self, version: int) -> VersionBurnt:
        await asyncio.sleep(0.05)
        return VersionBurnt(version)


def ask(ref: Ref, reason: str, version: int = 0, timeout: float = 10.0) -> Awaitable[VersionBurnt]:
    return ref.ask(BurnVersion(0, version, reason), block=False, timeout=timeout)


def tell(ref: Ref, reason: str, version: int = 0) -> None:
    ref.tell(AbortLoad(0, version, reason))


def played(
    scene: Callable[[Any, Stage], Coroutine[Any, Any, None]],
) -> Callable[[RefSuite], None]:
    """Make a test of a scene: run it on a fresh stage."""

    def test(self: RefSuite) -> None:
        async def play() -> None:
            async with asyncio.timeout(PATIENCE_S), self.stage() as stage:
                await scene(self, stage)

        self.run(play())

    test.__name__ = scene.__name__
    return test


class RefSuite:
    run: Callable[[Coroutine[Any, Any, None]], None] = staticmethod(asyncio.run)

    def stage(self) -> AbstractAsyncContextManager[Stage]:
        raise NotImplementedError

    @played
    async def test_an_ask_ends_in_the_reply(self, stage: Stage) -> None:
        ref = await stage.start(Target, "target")
        assert ref.name == "target"
        assert await ask(ref, "echo", 42) == VersionBurnt(42)

    @played
    async def test_each_of_many_asks_gets_its_own_reply(self, stage: Stage) -> None:
        ref = await stage.start(Target, "target")
        asks = [ask(ref, "slow" if i % 2 else "echo", i) for i in range(100)]
        assert await asyncio.gather(*asks) == [VersionBurnt(i) for i in range(100)]

    @played
    async def test_a_slow_ask_holds_nothing_up(self, stage: Stage) -> None:
        ref = await stage.start(Target, "target")
        hanging = asyncio.ensure_future(ask(ref, "hang", timeout=PATIENCE_S))
        assert await ask(ref, "echo", 1) == VersionBurnt(1)
        hanging.cancel()

    @played
    async def test_tells_arrive_in_order(self, stage: Stage) -> None:
        ref = await stage.start(Target, "target")
        for i in range(1000):
            tell(ref, "note", i)
        assert await ask(ref, "seen") == VersionBurnt(1000)

    @played
    async def test_an_error_on_purpose_reaches_the_asker(self, stage: Stage) -> None:
        ref = await stage.start(Target, "target")
        with pytest.raises(StaleTerm, match="term 1 is fenced by term 2"):
            await ask(ref, "refuse")
        assert await ask(ref, "echo", 1) == VersionBurnt(1)

    @played
    async def test_an_unexpected_error_reaches_the_asker(self, stage: Stage) -> None:
        ref = await stage.start(Target, "target")
        with pytest.raises(HandlerFailed, match="ValueError: boom"):
            await ask(ref, "crash")
        assert await ask(ref, "echo", 1) == VersionBurnt(1)

    @played
    async def test_an_ask_ends_at_its_deadline(self, stage: Stage) -> None:
        ref = await stage.start(Target, "target")
        loop = asyncio.get_running_loop()
        begin = loop.time()
        with pytest.raises(AskTimeout, match=r"target for BurnVersion.* 0\.1 s"):
            await ask(ref, "hang", timeout=0.1)
        assert 0.099 <= loop.time() - begin < PATIENCE_S / 2
        assert await ask(ref, "echo", 1) == VersionBurnt(1)

    @played
    async def test_a_late_reply_is_ignored(self, stage: Stage) -> None:
        ref = await stage.start(Target, "target")
        with pytest.raises(AskTimeout):
            await ask(ref, "slow", 1, timeout=0.001)
        # asked later, with the same delay: when it is answered, the late reply has come and gone
        assert await ask(ref, "slow", 2) == VersionBurnt(2)
        assert await ask(ref, "echo", 3) == VersionBurnt(3)

    @played
    async def test_asks_in_hand_end_when_the_actor_stops(self, stage: Stage) -> None:
        ref = await stage.start(Target, "target")
        asks = [ask(ref, "hang", timeout=PATIENCE_S) for _ in range(50)]
        tell(ref, "stop")
        outcomes = await asyncio.gather(*asks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ActorDead] * 50

    @played
    async def test_a_dead_actor(self, stage: Stage) -> None:
        ref = await stage.start(Target, "target")
        heard = await watch(stage, ref)
        tell(ref, "stop")
        assert await heard.get() == ("target", "stopped")
        before = num_dead_letters(stage)
        tell(ref, "note")
        with pytest.raises(ActorDead):
            await ask(ref, "echo")  # comes after the tell: that one is accounted for by now
        assert num_dead_letters(stage) - before == 1
        assert heard.empty()

    @played
    async def test_a_watcher_is_told_the_reason(self, stage: Stage) -> None:
        ref = await stage.start(Target, "target")
        heard = await watch(stage, ref)
        tell(ref, "crash")
        assert await heard.get() == ("target", "ValueError: boom")

    @played
    async def test_each_of_two_watchers_is_told(self, stage: Stage) -> None:
        ref = await stage.start(Target, "target")
        heard = [await watch(stage, ref, name) for name in ("first", "second")]
        tell(ref, "stop")
        assert [await each.get() for each in heard] == [("target", "stopped")] * 2

    @played
    async def test_who_watches_too_late_is_told_at_once(self, stage: Stage) -> None:
        ref = await stage.start(Target, "target")
        first = await watch(stage, ref)
        tell(ref, "stop")
        await first.get()
        second = await watch(stage, ref, "second")
        name, reason = await second.get()
        assert name == "target"
        assert reason

    @played
    async def test_the_trace_travels(self, stage: Stage) -> None:
        ref = await stage.start(Target, "target")
        token = current_trace.set(Trace("t-1", 7))
        try:
            assert await ask(ref, "trace") == VersionBurnt(7)
        finally:
            current_trace.reset(token)


async def watch(stage: Stage, ref: Ref, name: str = "witness") -> asyncio.Queue[tuple[str, str]]:
    """Watch `ref` from the caller's side, and wait until the watch is in place."""
    heard: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    ref.watch(Witness.start(stage.caller, name, heard))
    with suppress(ActorDead):
        await ask(ref, "echo")
    return heard


def num_dead_letters(stage: Stage) -> int:
    systems = {id(system): system for system in (stage.caller, stage.target)}
    return sum(system.dead_letters.total for system in systems.values())
