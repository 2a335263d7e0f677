"""How a supervisor itself ends: by an escalation, with its children, or cancelled."""

from __future__ import annotations

import asyncio

import pytest
from tests.helpers.scripted_children import World, scenario, settle, world
from tests.simulation.loop import run_virtual

from ratchet.actors.restarts import End, Escalate
from ratchet.actors.supervisor import ESCALATION_S


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
