"""The runner, on a virtual loop, with children that do what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from tests.helpers.actors import RecordingLog
from tests.simulation.loop import run_virtual

from ratchet.actors.restarts import End, EndKind, Escalate, Rules
from ratchet.actors.supervisor import ESCALATION_S, Member, Supervisor


class Scripted:
    """Writes what is done to it, and when, into a diary."""

    def __init__(self, name: str, diary: list[tuple[float, str]]) -> None:
        self.name = name
        self._diary = diary
        self.refusals = 0
        """starts that raise"""
        self.stop_takes_s: float | None = 0.0
        """None: for ever"""
        self._end: asyncio.Future[End] | None = None

    def _note(self, what: str) -> None:
        self._diary.append((asyncio.get_running_loop().time(), f"{what} {self.name}"))

    async def start(self) -> None:
        self._note("start")
        self._end = asyncio.get_running_loop().create_future()
        if self.refusals:
            self.refusals -= 1
            raise OSError("no process to be had")

    def end(self, kind: EndKind = "abnormal", reason: str = "") -> None:
        assert self._end is not None
        if not self._end.done():
            self._end.set_result(End(self.name, kind, reason or f"{self.name} broke"))

    async def ended(self) -> End:
        assert self._end is not None
        return await asyncio.shield(self._end)

    async def stop(self) -> None:
        self._note("stop")
        await asyncio.sleep(1e9 if self.stop_takes_s is None else self.stop_takes_s)
        self.end(reason="stopped by a signal")

    async def kill(self) -> None:
        self._note("kill")
        self.end(reason="killed")


@dataclass
class World:
    """Children a, b and c under one supervisor."""

    diary: list[tuple[float, str]]
    children: dict[str, Scripted]
    log: RecordingLog
    supervisor: Supervisor

    def __getitem__(self, name: str) -> Scripted:
        return self.children[name]

    def take(self) -> list[tuple[float, str]]:
        """What was done since the last look."""
        taken, self.diary[:] = self.diary[:], []
        return taken

    def what(self) -> list[str]:
        return [what for _, what in self.take()]


def world(*, stop_s: float = 5.0, names: str = "abc", **options: Any) -> World:
    diary: list[tuple[float, str]] = []
    log = RecordingLog()
    children = {name: Scripted(name, diary) for name in names}
    rules = {"max_restarts": 5} | {k: v for k, v in options.items() if k in Rules.__annotations__}
    rest = {k: v for k, v in options.items() if k not in rules}
    members = [
        Member(child, significant="until" in rules, stop_s=stop_s) for child in children.values()
    ]
    supervisor = Supervisor("root", members, Rules(**rules), log=log, **rest)
    return World(diary, children, log, supervisor)


def scenario(body: Callable[[World], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        made = world(**options)
        await made.supervisor.start()
        await asyncio.sleep(2**-10)  # a power of two keeps sums exact
        assert made.what() == ["start a", "start b", "start c"]
        return await body(made)

    return run_virtual(main())


async def settle() -> None:
    await asyncio.sleep(2**-20)


# --- order


def test_a_stop_is_in_reverse_order_one_after_the_other_and_no_failure() -> None:
    async def body(world: World) -> None:
        for name in "abc":
            world[name].stop_takes_s = 1.0
        await world.supervisor.stop()
        assert [(round(at), what) for at, what in world.take()] == [
            (0, "stop c"),
            (1, "stop b"),
            (2, "stop a"),
        ]
        assert await world.supervisor.ended() == End("root", "normal", "stopped")
        assert world.log.named("child_ended") == []

    scenario(body)


def test_children_that_do_not_depend_on_each_other_stop_side_by_side() -> None:
    async def body(world: World) -> None:
        for name in "abc":
            world[name].stop_takes_s = 1.0
        began = asyncio.get_running_loop().time()
        await world.supervisor.stop()
        assert world.what() == ["stop c", "stop b", "stop a"]
        assert asyncio.get_running_loop().time() - began == 1.0

    scenario(body, stops_together=True)


@pytest.mark.parametrize(
    ("strategy", "done"),
    [
        ("one_for_one", ["start b"]),
        ("one_for_all", ["stop c", "stop a", "start a", "start b", "start c"]),
        ("rest_for_one", ["stop c", "start b", "start c"]),
    ],
)
def test_each_strategy(strategy: str, done: list[str]) -> None:
    async def body(world: World) -> None:
        world["b"].end()
        await settle()
        assert world.what() == done
        await world.supervisor.stop()
        assert world.what() == ["stop c", "stop b", "stop a"]

    scenario(body, strategy=strategy, max_restarts=1)  # the siblings' ends do not count


# --- time


def test_backoff_is_exact() -> None:
    async def body(world: World) -> None:
        pauses = []
        for _ in range(5):
            await asyncio.sleep(1.0)
            world["b"].end()
            ended = asyncio.get_running_loop().time()
            await asyncio.sleep(10)
            ((at, what),) = world.take()
            assert what == "start b"
            pauses.append(round(at - ended, 6))
        assert pauses == [0.5, 1.0, 2.0, 3.0, 3.0]

    scenario(body, backoff_first_s=0.5, backoff_most_s=3.0)


def test_a_child_that_hangs_in_its_stop_is_killed_after_its_time() -> None:
    async def body(world: World) -> None:
        world["b"].stop_takes_s = None
        await world.supervisor.stop()
        assert [(round(at, 2), what) for at, what in world.take()] == [
            (0.0, "stop c"),
            (0.0, "stop b"),
            (5.0, "kill b"),
            (5.0, "stop a"),
        ]
        (killed,) = world.log.named("child_killed")
        assert (killed["name"], killed["after_s"]) == ("b", 5.0)

    scenario(body)


def test_a_restart_that_waits_is_not_done_after_a_stop() -> None:
    async def body(world: World) -> None:
        world["b"].end()
        await settle()
        await world.supervisor.stop()
        await asyncio.sleep(100)
        assert world.what() == ["stop c", "stop a"]

    scenario(body, backoff_first_s=10.0, backoff_most_s=10.0)


def test_nothing_is_polled() -> None:
    async def main() -> int:
        made = world()
        await made.supervisor.start()
        turns = 0

        def turn() -> None:
            nonlocal turns
            turns += 1

        loop: Any = asyncio.get_running_loop()
        select = loop._selector.select
        loop._selector.select = lambda timeout=None: (turn(), select(timeout))[1]
        await asyncio.sleep(86400.0)
        return turns

    assert run_virtual(main()) < 10


# --- starts that fail


def test_a_start_that_raises_is_tried_again_as_an_end() -> None:
    async def main() -> None:
        made = world(backoff_first_s=1.0, backoff_most_s=1.0)
        made["b"].refusals = 2
        await made.supervisor.start()
        await asyncio.sleep(10)
        assert [(round(at), what) for at, what in made.take()] == [
            (0, "start a"), (0, "start b"), (0, "start c"), (1, "start b"), (2, "start b"),
        ]  # fmt: skip

    run_virtual(main())


def test_a_start_that_always_raises_is_the_cause_in_the_end() -> None:
    async def main() -> None:
        made = world(max_restarts=2, strategy="one_for_all")
        made["b"].refusals = 10
        await made.supervisor.start()
        end = await made.supervisor.ended()
        assert end.kind == "abnormal"
        assert end.reason == (
            "b could not start: OSError: no process to be had (the first of 3 ends of root within"
            " 60 s, of which max_restarts allows 2)"
        )
        assert made.what() == ["start a", "start b", "stop a"] * 3  # and never c

    run_virtual(main())


# --- ends at the same time


def test_an_end_during_a_stop_is_not_judged() -> None:
    async def body(world: World) -> None:
        world["c"].stop_takes_s = 2.0
        world["b"].end()
        await asyncio.sleep(1.0)
        world["c"].end(reason="crashed while it stopped")
        await asyncio.sleep(10)
        assert world.what() == ["stop c", "start b", "start c"]

    scenario(body, strategy="rest_for_one", max_restarts=1)


def test_an_end_of_another_during_a_stop_is_judged_after_it() -> None:
    async def body(world: World) -> None:
        world["c"].stop_takes_s = 2.0
        world["b"].end()
        await asyncio.sleep(1.0)
        world["a"].end()
        await asyncio.sleep(0.5)
        assert world.what() == ["stop c"]
        await asyncio.sleep(10)
        assert world.what() == ["start a", "start b", "start c"]

    scenario(body, strategy="rest_for_one", max_restarts=2)


def test_of_ends_at_one_moment_that_of_the_earlier_child_is_the_cause() -> None:
    async def body(world: World) -> End:
        for name in "cba":
            world[name].end()
        return await world.supervisor.ended()

    assert scenario(body, max_restarts=0) == End("root", "abnormal", "a broke")


# --- cause and consequence


def test_a_cause_that_is_heard_of_within_the_grace_comes_before_its_consequence() -> None:
    async def body(world: World) -> End:
        world["c"].end("consequence", "c has lost a")
        await asyncio.sleep(0.99)
        world["a"].end("abnormal", "a died of signal 9")
        return await world.supervisor.ended()

    assert scenario(body, max_restarts=0).reason == "a died of signal 9"


def test_a_consequence_without_a_cause_is_judged_after_the_grace() -> None:
    async def body(world: World) -> tuple[float, End]:
        began = asyncio.get_running_loop().time()
        world["c"].end("consequence", "c has lost a")
        end = await world.supervisor.ended()
        return asyncio.get_running_loop().time() - began, end

    took_s, end = scenario(body, max_restarts=0)
    assert took_s == 1.0
    assert end == End("root", "abnormal", "c has lost a")


def test_a_stop_within_the_grace_makes_it_no_failure() -> None:
    async def body(world: World) -> End:
        world["c"].end("consequence", "c was stopped from outside")
        await asyncio.sleep(0.5)
        await world.supervisor.stop()
        assert world.what() == ["stop c", "stop b", "stop a"]  # c is told, and has ended already
        return await world.supervisor.ended()

    assert scenario(body, max_restarts=0).kind == "normal"


# --- the end


def test_an_escalation_stops_all_and_names_the_first_cause() -> None:
    async def body(world: World) -> End:
        for name in "bcb":
            world[name].end()
            await asyncio.sleep(1)
        assert world.what()[2:] == ["stop c", "stop a"]
        await asyncio.sleep(100)
        assert world.what() == []  # nothing runs after it
        return await world.supervisor.ended()

    assert scenario(body, max_restarts=2).reason.startswith("b broke (the first of 3 ends of root")


def test_who_is_told_of_an_escalation_is_told_before_the_stop() -> None:
    told: list[tuple[str, list[str]]] = []

    async def main() -> End:
        async def tell(verdict: Escalate) -> None:
            told.append((verdict.first.reason, made.what()))

        made = world(max_restarts=0, on_escalation=tell)
        await made.supervisor.start()
        await settle()
        made["b"].end()
        end = await made.supervisor.ended()
        assert made.what() == ["stop c", "stop a"]
        return end

    assert run_virtual(main()).reason == "b broke"
    assert told == [("b broke", ["start a", "start b", "start c"])]


@pytest.mark.parametrize("hangs", [True, False])
def test_who_cannot_be_told_of_an_escalation_does_not_hide_it(hangs: bool) -> None:
    async def tell(verdict: Escalate) -> None:
        if hangs:
            await asyncio.Event().wait()
        raise ConnectionError("the registry is gone")

    async def body(world: World) -> tuple[End, float]:
        began = asyncio.get_running_loop().time()
        world["b"].end()
        end = await world.supervisor.ended()
        assert len(world.log.named("escalation_not_told")) == 1
        return end, asyncio.get_running_loop().time() - began

    end, took_s = scenario(body, max_restarts=0, on_escalation=tell)
    assert end.reason == "b broke"
    assert took_s == (ESCALATION_S if hangs else 0.0)


def test_it_ends_in_order_with_the_last_of_its_children() -> None:
    async def body(world: World) -> End:
        for name in "bca":
            world[name].end("normal", f"{name} is done")
            await asyncio.sleep(1)
        return await world.supervisor.ended()

    assert scenario(body, until="all") == End("root", "normal", "a is done")


def test_who_is_cancelled_twice_kills_instead_of_waiting() -> None:
    async def main() -> None:
        made = world()
        for name in "abc":
            made[name].stop_takes_s = None
        await made.supervisor.start()
        await settle()
        task = made.supervisor._running
        task.cancel()
        await settle()
        task.cancel()
        await asyncio.wait([task])
        assert made.what()[3:] == ["stop c", "kill a", "kill b", "kill c"]

    run_virtual(main())


# --- nesting


def nested(max_restarts: int) -> tuple[World, World, Supervisor]:
    inner = world(names="xyz", max_restarts=max_restarts, stops_together=True)
    inner.supervisor.name = "workers"
    outer = world(names="ab")
    members = [*outer.supervisor._members.values(), Member(inner.supervisor)]
    root = Supervisor("root", members, Rules("one_for_all"), log=outer.log)
    return outer, inner, root


def test_an_escalation_below_is_an_abnormal_end_above() -> None:
    async def main() -> None:
        outer, inner, root = nested(max_restarts=1)
        await root.start()
        await settle()
        inner["y"].end()
        await settle()
        assert inner.what() == ["start x", "start y", "start z", "start y"]
        inner["z"].end()
        end = await root.ended()
        assert end.who == "root"
        assert end.reason.startswith("y broke (the first of 2 ends of workers within 60 s")
        assert inner.what() == ["stop y", "stop x"]
        assert outer.what() == ["start a", "start b", "stop b", "stop a"]

    run_virtual(main())


def test_a_cause_above_is_heard_before_its_consequence_below() -> None:
    async def main() -> None:
        outer, inner, root = nested(max_restarts=0)
        await root.start()
        await settle()
        inner["x"].end("consequence", "x has lost a")
        await asyncio.sleep(0.9)
        outer["a"].end("abnormal", "a died of signal 9")
        assert (await root.ended()).reason == "a died of signal 9"

    run_virtual(main())


def test_a_supervisor_starts_again_like_any_child() -> None:
    async def main() -> None:
        inner = world(names="xy", max_restarts=1)
        root = Supervisor("root", [Member(inner.supervisor)], Rules(max_restarts=1), log=inner.log)
        await root.start()
        for _ in range(2):
            await settle()
            inner["x"].end()
        await settle()
        assert inner.what() == ["start x", "start y", "start x", "stop y", "start x", "start y"]
        inner["y"].end()  # its count began anew
        await settle()
        assert inner.what() == ["start y"]
        await root.stop()
        assert inner.what() == ["stop y", "stop x"]

    run_virtual(main())
