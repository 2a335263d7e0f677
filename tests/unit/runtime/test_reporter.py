"""What a process tells of itself, how often, and by which clock."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import pytest
from tests.contract.ref_suite import Target
from tests.helpers.actors import make_system
from tests.helpers.refs import RecordedDirectory
from tests.simulation.loop import VirtualLoop, run_virtual

from ratchet.actors.system import System
from ratchet.messages import AbortLoad, RoleReported
from ratchet.runtime.reporter import Reporter, join_waits
from ratchet.status import DeadLetterRow, LinkRow, RoleReport, WaitRow
from ratchet.transport.mailbox.base import Wait
from ratchet.types import RoleInfo

ROLE = RoleInfo("buffer", "target", "life-1")


class Talker(Target):
    def status(self) -> dict[str, Any]:
        return {"queue_groups": 3, "paused": False}


class World:
    def __init__(self, **kwargs: Any) -> None:
        self.others = RecordedDirectory()
        self.system: System = make_system(remote=self.others)
        self.links: list[LinkRow] = []
        self.system.links = lambda: tuple(self.links)
        self.ref = Talker.start(self.system, "target")
        self.reporter = Reporter(self.system, ROLE, **{"every_s": 1.0, **kwargs})

    @property
    def reports(self) -> list[RoleReport]:
        return [told.report for told in self.others.ref("registry").of(RoleReported)]


def scenario(body: Callable[[World], Awaitable[None]], **kwargs: Any) -> None:
    async def main() -> None:
        world = World(**kwargs)
        await body(world)
        world.reporter.stop()
        await world.ref.stop(block=False)

    run_virtual(main())


def block(seconds: float) -> None:
    """Hold the loop up, as a long computation does."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop._virtual.now += seconds


def test_a_report_each_heartbeat_until_it_is_stopped() -> None:
    async def body(world: World) -> None:
        world.reporter.start()
        await asyncio.sleep(10.1)
        assert len(world.reports) == 10
        uptimes = [round(report.uptime_s, 3) for report in world.reports]
        assert uptimes == [0.25 + n for n in range(10)]
        world.reporter.stop()
        await asyncio.sleep(10)
        assert len(world.reports) == 10

    scenario(body)


def test_what_it_says() -> None:
    async def body(world: World) -> None:
        world.links.append(LinkRow("registry", True, 0.5, 1, 2))
        world.system.dead_letters.record(sender="a", receiver="b", message=1, reason="r")
        world.ref.tell(AbortLoad(0, 1, ""))
        world.ref.tell(AbortLoad(0, 2, ""))
        with world.system.waits.on(who="target", on="x", what="Y", since=-2.0, until=7.0):
            report = world.reporter.report()
        assert report == RoleReport(
            kind="buffer",
            name="target",
            incarnation="life-1",
            pid=os.getpid(),
            host=socket.gethostname(),
            uptime_s=0.0,
            loop_lag_s=0.0,
            mailboxes={"target": 2},
            facts={"queue_groups": 3, "paused": False},
            waits=(WaitRow("target", "x", "Y", 2.0, 7.0),),
            links=(LinkRow("registry", True, 0.5, 1, 2),),
            num_dead_letters=1,
            dead_letters=(DeadLetterRow("a", "b", "int", "r", 1),),
        )

    scenario(body)


def test_the_lag_is_the_worst_since_the_last_report() -> None:
    async def body(world: World) -> None:
        world.reporter.start()
        await asyncio.sleep(1.3)  # the second report is out
        block(0.7)  # over the wake-ups at 1.5 s and 1.75 s
        await asyncio.sleep(3.0)
        assert [round(report.loop_lag_s, 3) for report in world.reports[:4]] == [0, 0, 0.5, 0]

    scenario(body)


def test_a_loop_that_was_stopped_reports_once_and_not_for_each_second_it_missed() -> None:
    async def body(world: World) -> None:
        world.reporter.start()
        await asyncio.sleep(1.3)
        block(20.0)
        await asyncio.sleep(0)
        await asyncio.sleep(1.2)
        lags = [round(report.loop_lag_s, 3) for report in world.reports]
        assert lags == [0, 0, 19.8, 0]

    scenario(body)


def test_while_the_registry_cannot_be_reached_nothing_is_told_that_would_be_old() -> None:
    async def body(world: World) -> None:
        world.links.append(LinkRow("registry", False, 0.0, 0, 0))
        world.reporter.start()
        await asyncio.sleep(30)
        assert world.reports == []
        world.links[0] = LinkRow("registry", True, 0.0, 0, 0)
        await asyncio.sleep(1.1)
        assert len(world.reports) == 1

    scenario(body)


def test_links_in_trouble_come_first_and_visitors_not_at_all() -> None:
    async def body(world: World) -> None:
        world.links += [LinkRow(f"rollout-{n}", True, 0.0, 0, 0) for n in range(100)]
        world.links += [
            LinkRow("visitor-1", False, 0.0, 9, 0, "gone"),
            LinkRow("busy", True, 0.0, 5, 0),
            LinkRow("lost", False, 0.0, 0, 0),
        ]
        links = world.reporter.report().links
        assert [link.peer for link in links[:3]] == ["lost", "busy", "rollout-0"]
        assert len(links) == 64

    scenario(body)


def test_a_fact_that_cannot_be_told_is_an_error_of_the_loop_and_does_not_end_the_reports() -> None:
    async def body(world: World) -> None:
        heard: list[Any] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: heard.append(context["exception"]))
        actor = world.ref._status().__self__
        actor.status = broken
        world.ref._status = lambda: actor.status
        world.reporter.start()
        await asyncio.sleep(1.1)
        world.ref._status = lambda: lambda: {}
        await asyncio.sleep(1.0)
        assert [str(error) for error in heard] == ["no facts today"]
        assert len(world.reports) == 1

    scenario(body)


def broken() -> NoReturn:
    raise ValueError("no facts today")


def test_a_wall_clock_that_jumps_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def wall() -> NoReturn:
        raise AssertionError("nobody here reads the wall clock")

    async def body(world: World) -> None:
        monkeypatch.setattr(time, "time", wall)
        world.reporter.start()
        await asyncio.sleep(3.1)
        assert len(world.reports) == 3

    scenario(body)


# --- waits


def wait(what: str, since: float, who: str = "a", on: str = "b") -> Wait:
    return Wait(who, on, what, since, since + 30)


@pytest.mark.parametrize(
    ("rows", "asks", "joined"),
    [
        ([], [], []),
        ([wait("X", 1)], [wait("X", 1.00001)], [wait("X", 1)]),
        ([wait("X", 1)], [], [wait("X", 1)]),
        ([], [wait("X", 1)], [wait("X", 1)]),
        # one is an actor's own, the other is not
        ([wait("X", 5)], [wait("X", 1), wait("X", 5.00001)], [wait("X", 1), wait("X", 5)]),
        (
            [wait("X", 1), wait("X", 2)],
            [wait("X", 2), wait("X", 1), wait("X", 3)],
            [wait("X", 1), wait("X", 2), wait("X", 3)],
        ),
        # another name
        ([wait("X", 2)], [wait("Y", 1)], [wait("Y", 1), wait("X", 2)]),
        ([wait("X", 2)], [wait("X", 2, on="c")], [wait("X", 2), wait("X", 2, on="c")]),
        ([wait("X", 2)], [wait("X", 2, who="c")], [wait("X", 2), wait("X", 2, who="c")]),
        # an actor waits twice within this process for what it asked of another once
        ([wait("X", 1), wait("X", 2)], [wait("X", 2)], [wait("X", 1), wait("X", 2)]),
    ],
)
def test_no_wait_is_counted_twice_and_none_is_left_out(
    rows: list[Wait], asks: list[Wait], joined: list[Wait]
) -> None:
    assert join_waits(rows, asks) == joined
