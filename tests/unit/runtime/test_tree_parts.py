"""What the end of a role means where only a part of the run is."""

from __future__ import annotations

import asyncio

from tests.helpers.scripted_roles import ALL, World, scenario

from ratchet.runtime.role import RoleOutcome
from ratchet.runtime.tree import role_end

ROLLOUTS = ALL[3:]


def test_without_the_trainer_it_ends_when_the_registry_has_seen_all_off() -> None:
    async def body(world: World) -> None:
        for name in ("rollout-0", "buffer"):
            world[name].end("finished", "3 steps")
            await asyncio.sleep(100)
            assert not world.outcome.done()
        world["registry"].end("finished", "3 steps")  # rollout-1 has not heard of the end
        await asyncio.sleep(10)
        assert world.stopped == ["rollout-1"]

    roles = tuple(role for role in ALL if role[0] != "trainer")
    assert scenario(body, roles)[0] == RoleOutcome("finished", "3 steps")


def test_without_trainer_and_registry_it_ends_when_all_are_finished() -> None:
    async def body(world: World) -> None:
        world["buffer"].end("finished", "3 steps")
        await asyncio.sleep(100)
        assert not world.outcome.done()
        for name in ("rollout-0", "rollout-1"):
            world[name].end("finished", "3 steps")

    roles = tuple(role for role in ALL if role[0] in {"buffer", "rollout"})
    assert scenario(body, roles)[0] == RoleOutcome("finished", "3 steps")


def test_workers_alone_end_their_launcher_when_they_die_too_often() -> None:
    async def body(world: World) -> None:
        for _ in range(2):
            world["rollout-0"].end("failed", "rollout-0 died of signal 9")
            await asyncio.sleep(1)

    outcome, world = scenario(body, ROLLOUTS, max_restarts=1)
    assert outcome.status == "failed"
    assert outcome.detail.startswith("rollout-0 died of signal 9 (the first of 2 ends of workers")
    assert world.told == [outcome.detail]


def test_workers_alone_hear_that_the_run_has_failed_elsewhere() -> None:
    outcome, world = scenario(
        lambda w: w["rollout-1"].end("run_failed", "buffer died of signal 9"), ROLLOUTS
    )
    assert outcome == RoleOutcome("run_failed", "buffer died of signal 9")
    assert world.told == []


def test_a_role_that_another_has_replaced_does_not_end_the_run_of_that() -> None:
    def body(world: World) -> None:
        outcome = RoleOutcome("user_error", "a newer process has taken the name", replaced=True)
        world["rollout-0"]._end.set_result(role_end("rollout-0", outcome))

    outcome, world = scenario(body, ROLLOUTS)
    assert outcome.replaced
    assert world.told == []


def test_a_stop_without_the_trainer_stops_what_is_here() -> None:
    outcome, world = scenario(lambda w: w.stop.set(), ROLLOUTS)
    assert outcome == RoleOutcome("stopped", "interrupted")
    assert world.stopped == ["rollout-1", "rollout-0"]
