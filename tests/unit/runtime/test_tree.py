"""What the end of each role means for a run that is here as a whole."""

from __future__ import annotations

import asyncio

import pytest
from tests.helpers.scripted_roles import ALL, REVERSED, World, scenario

from ratchet.runtime.role import RoleOutcome
from ratchet.types import RoleKind


def test_the_trainers_end_is_the_runs_and_the_others_stop_the_registry_last() -> None:
    outcome, world = scenario(lambda w: w["trainer-0"].end("finished", "3 steps are trained"))
    assert outcome == RoleOutcome("finished", "3 steps are trained")
    assert world.stopped == [name for name in REVERSED if name != "trainer-0"]
    assert world.told == []


def test_others_that_leave_first_because_the_run_is_over_do_not_matter() -> None:
    async def body(world: World) -> None:
        for name in ("registry", "rollout-0", "buffer", "rollout-1"):
            world[name].end("finished", "3 steps")
            await asyncio.sleep(1)
        assert not world.outcome.done()
        world["trainer-0"].end("finished", "3 steps")

    outcome, world = scenario(body)
    assert outcome.status == "finished"
    assert world.stopped == []


def test_the_run_goes_on_without_evaluators_that_end_too_often() -> None:
    async def body(world: World) -> None:
        for _ in range(2):
            world["evaluator-0"].end("failed", "GenerationFailed: x")
            await asyncio.sleep(5)
        assert not world.outcome.done()
        world["trainer-0"].end("finished", "3 steps")

    roles: tuple[tuple[RoleKind, str], ...] = (*ALL, ("evaluator", "evaluator-0"))
    outcome, world = scenario(body, roles, max_restarts=1)
    assert outcome == RoleOutcome("finished", "3 steps")
    assert world["evaluator-0"].starts == 2
    assert world.told == []


def test_an_evaluator_alone_is_all_that_its_launcher_has() -> None:
    async def body(world: World) -> None:
        for _ in range(2):
            world["evaluator-0"].end("failed", "GenerationFailed: x")
            await asyncio.sleep(5)

    outcome, _ = scenario(body, (("evaluator", "evaluator-0"),), max_restarts=1)
    assert outcome.status == "failed"
    outcome, _ = scenario(
        lambda w: w["evaluator-0"].end("finished", "over"), (("evaluator", "evaluator-0"),)
    )
    assert outcome == RoleOutcome("finished", "over")


@pytest.mark.parametrize("name", ["registry", "buffer"])
def test_a_registry_or_buffer_that_dies_starts_again_and_nobody_else(name: str) -> None:
    async def body(world: World) -> None:
        for detail in (f"{name} died of signal 9", "AskTimeout: no reply"):
            world[name].end("failed", detail)
            await asyncio.sleep(2)
        world["trainer-0"].end("finished", "9 steps")

    outcome, world = scenario(body)
    assert outcome == RoleOutcome("finished", "9 steps")
    starts = {role: world[role].starts for role in REVERSED}
    assert starts == dict.fromkeys(REVERSED, 1) | {name: 3}
    assert world.told == []


@pytest.mark.parametrize("name", ["registry", "buffer"])
def test_a_registry_or_buffer_that_dies_too_often_ends_the_run(name: str) -> None:
    async def body(world: World) -> None:
        for _ in range(2):
            world[name].end("failed", "LedgerError: x")
            await asyncio.sleep(2)

    outcome, world = scenario(body, max_restarts=1)
    assert outcome.status == "failed"
    assert outcome.detail.startswith(f"{name}: LedgerError: x (the first of 2 ends of")
    assert world.told == [outcome.detail]
    assert world.stopped == [n for n in REVERSED if n != name]


def test_a_buffer_that_says_why_the_run_cannot_go_on_ends_it() -> None:
    outcome, world = scenario(lambda w: w["buffer"].end("failed", "RunFailed: buffer: no policy"))
    assert outcome == RoleOutcome("failed", "buffer: no policy")
    assert world["buffer"].starts == 1


@pytest.mark.parametrize("name", ["rollout-0", "trainer-0"])
@pytest.mark.parametrize("status", ["user_error", "run_failed"])
def test_what_no_restart_mends_is_not_tried_again(name: str, status: str) -> None:
    outcome, world = scenario(lambda w: w[name].end(status, "why"))
    assert outcome == RoleOutcome(status, "why")
    assert world[name].starts == 1
    assert world.told == (["why"] if status == "user_error" else [])  # the registry told us


def test_a_trainer_that_dies_starts_again_and_nobody_else() -> None:
    async def body(world: World) -> None:
        for detail in (
            "trainer-0 died of signal 9",
            "TransferFailed: no engine answers",
            "RunFailed: trainer-0 has lost the registry: silent for 15 s",
        ):
            world["trainer-0"].end("failed", detail)
            await asyncio.sleep(2)
        world["trainer-0"].end("finished", "9 steps")

    outcome, world = scenario(body)
    assert outcome == RoleOutcome("finished", "9 steps")
    assert [role.starts for role in world.roles.values()] == [1, 1, 4, 1, 1]
    assert world.told == []


def test_a_trainer_that_dies_too_often_ends_the_run() -> None:
    async def body(world: World) -> None:
        for _ in range(2):
            world["trainer-0"].end("failed", "trainer-0 died of signal 9")
            await asyncio.sleep(2)

    outcome, world = scenario(body, max_restarts=1)
    assert outcome.status == "failed"
    assert outcome.detail.startswith("trainer-0 died of signal 9 (the first of 2 ends of training")
    assert world.told == [outcome.detail]


def test_what_a_trainer_says_itself_ends_the_run() -> None:
    said = "3 steps in a row were not finite"
    outcome, world = scenario(lambda w: w["trainer-0"].end("failed", f"RunFailed: {said}"))
    assert outcome == RoleOutcome("failed", f"trainer-0: {said}")
    assert world["trainer-0"].starts == 1
    assert world.told == [outcome.detail]


def test_a_trainer_that_another_has_replaced_ends_alone() -> None:
    words = RoleOutcome("user_error", "term 1 is fenced by term 2", replaced=True)
    outcome, world = scenario(lambda w: w["trainer-0"].leave(words), (("trainer", "trainer-0"),))
    assert outcome == words
    assert world["trainer-0"].starts == 1
    assert world.told == []


def test_workers_start_again_until_the_budget_of_all_is_spent() -> None:
    async def body(world: World) -> None:
        for name in ("rollout-1", "rollout-0", "rollout-1"):
            world[name].end("failed", f"{name} died of signal 9")
            await asyncio.sleep(1)

    outcome, world = scenario(body, max_restarts=2)
    assert outcome.status == "failed"
    assert outcome.detail == (
        "rollout-1 died of signal 9 (the first of 3 ends of workers within 60 s, of which"
        " max_restarts allows 2)"
    )
    assert world.told == [outcome.detail]
    assert (world["rollout-0"].starts, world["rollout-1"].starts) == (2, 2)


def test_deaths_far_apart_never_end_a_run() -> None:
    async def body(world: World) -> None:
        for _ in range(6):
            await asyncio.sleep(61)
            world["rollout-0"].end("failed", "x")
        await asyncio.sleep(1)
        assert not world.outcome.done()
        assert world["rollout-0"].starts == 7
        world["trainer-0"].end("finished")

    assert scenario(body, max_restarts=1)[0].status == "finished"


@pytest.mark.parametrize(
    ("strategy", "starts"),
    [("one_for_one", (1, 2)), ("one_for_all", (2, 2)), ("rest_for_one", (1, 2))],
)
def test_the_strategy_of_the_workers_is_the_users(strategy: str, starts: tuple[int, int]) -> None:
    async def body(world: World) -> None:
        world["rollout-1"].end("failed", "x")
        await asyncio.sleep(1)
        assert (world["rollout-0"].starts, world["rollout-1"].starts) == starts
        assert world["trainer-0"].starts == 1
        world.kill.set()

    scenario(body, restart_strategy=strategy)


def test_the_pause_before_a_restart_is_the_users() -> None:
    async def body(world: World) -> None:
        world["rollout-1"].end("failed", "x")
        await asyncio.sleep(3.99)
        assert world["rollout-1"].starts == 1
        await asyncio.sleep(0.02)
        assert world["rollout-1"].starts == 2
        world.kill.set()

    scenario(body, backoff_first_s=4.0)
