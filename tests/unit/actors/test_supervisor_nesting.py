"""Supervisors that are children of supervisors."""

from __future__ import annotations

import asyncio

from tests.helpers.scripted_children import World, settle, world
from tests.simulation.loop import run_virtual

from ratchet.actors.restarts import Rules
from ratchet.actors.supervisor import Member, Supervisor


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
