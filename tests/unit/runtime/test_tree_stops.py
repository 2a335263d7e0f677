"""How a tree of roles stops, is killed or is cancelled: in which order, and how soon."""

from __future__ import annotations

import asyncio

from tests.helpers.scripted_roles import ALL, REVERSED, World, scenario
from tests.simulation.loop import run_virtual

from ratchet.runtime.role import RoleOutcome
from ratchet.runtime.tree import STOP_S


def test_a_stop_is_told_to_the_trainer_once_and_a_kill_ends_all() -> None:
    async def body(world: World) -> None:
        world.stop.set()
        await asyncio.sleep(100)
        assert world.stops_of_training == 1
        assert not world.outcome.done()
        world.kill.set()

    outcome, world = scenario(body)
    assert outcome == RoleOutcome("stopped", "interrupted")
    assert world.stopped == REVERSED
    assert world.log.named("child_ended") == []


def test_all_are_gone_in_ten_seconds_also_if_all_hang() -> None:
    async def body(world: World) -> None:
        for role in world.roles.values():
            role.hangs = True
        began = asyncio.get_running_loop().time()
        world.kill.set()
        await world.outcome
        took_s = asyncio.get_running_loop().time() - began
        assert (
            took_s == STOP_S["rollout"] + STOP_S["trainer"] + STOP_S["buffer"] + STOP_S["registry"]
        )
        assert took_s < 10
        return took_s

    _, world = scenario(body)
    assert [e["name"] for e in world.log.named("child_killed")] == [
        "rollout-1", "rollout-0", "trainer-0", "buffer", "registry",
    ]  # fmt: skip


def test_a_kill_while_a_failure_stops_the_roles_does_not_hide_the_failure() -> None:
    async def body(world: World) -> None:
        world["rollout-0"].hangs = True
        world["buffer"].end("failed", "RunFailed: buffer: why")
        await asyncio.sleep(1.5)
        world.kill.set()

    assert scenario(body)[0] == RoleOutcome("failed", "buffer: why")


def test_who_is_cancelled_stops_its_roles_first() -> None:
    async def main() -> list[str]:
        world = World(ALL)
        await asyncio.sleep(1)
        world.outcome.cancel()
        await asyncio.wait([world.outcome])
        assert world.outcome.cancelled()
        return world.stopped

    assert run_virtual(main()) == REVERSED
