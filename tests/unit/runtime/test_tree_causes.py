"""Which end counts as the cause of a run's end, and which as its consequence, or as a stop."""

from __future__ import annotations

import asyncio

import pytest
from tests.helpers.scripted_roles import World, scenario

from ratchet.runtime.role import RoleOutcome


@pytest.mark.parametrize(
    "detail",
    [
        "RunFailed: {} has lost the registry: the process of registry has ended",
        "ActorDead: the process of registry has ended",
        "AskTimeout: no reply",
    ],
)
def test_the_cause_is_named_and_not_what_fell_over_afterwards(detail: str) -> None:
    async def body(world: World) -> None:
        for name in ("rollout-1", "trainer-0", "rollout-0", "buffer"):
            world[name].end("failed", detail.format(name))
            await asyncio.sleep(0.2)
        world["registry"].end("failed", "registry died of signal 9; see registry-0.err")

    outcome, world = scenario(body, max_restarts=0)
    assert outcome == RoleOutcome("failed", "registry died of signal 9; see registry-0.err")
    assert world.told == [outcome.detail]


def test_a_consequence_alone_is_the_cause_in_the_end_and_said_once() -> None:
    text = "trainer-0 waited 300.0 s (trainer.batch_timeout_s) on buffer for the batch of step 4"
    outcome, _ = scenario(lambda w: w["trainer-0"].end("failed", f"RunFailed: {text}"))
    assert outcome == RoleOutcome("failed", text)


def test_a_worker_that_has_lost_the_registry_comes_back() -> None:
    async def body(world: World) -> None:
        world["rollout-0"].end("failed", "RunFailed: rollout-0 has lost the registry: silent")
        await asyncio.sleep(1.1)
        assert world["rollout-0"].starts == 2
        world["trainer-0"].end("finished")

    assert scenario(body)[0].status == "finished"


def test_a_signal_to_all_processes_at_once_is_a_stop_and_no_failure() -> None:
    async def body(world: World) -> None:
        for name in ("buffer", "rollout-0", "trainer-0"):
            world[name].end("stopped")
        await asyncio.sleep(0.5)
        world.kill.set()

    outcome, world = scenario(body, max_restarts=0)
    assert outcome == RoleOutcome("stopped", "interrupted")
    assert world["rollout-0"].starts == 1
    assert world.told == []


@pytest.mark.parametrize("name", ["rollout-0", "trainer-0", "buffer", "registry"])
def test_a_role_that_somebody_else_stops_is_started_again(name: str) -> None:
    async def body(world: World) -> None:
        world[name].end("stopped")
        await asyncio.sleep(2)
        assert world[name].starts == 2
        world.kill.set()

    scenario(body)
