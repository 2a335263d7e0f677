"""What the end of each role means for the run. The roles are scripted, the loop is virtual."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.helpers.actors import RecordingLog
from tests.helpers.config import small_config
from tests.simulation.loop import run_virtual

from ratchet.actors.restarts import End
from ratchet.runtime.role import RoleOutcome
from ratchet.runtime.tree import STOP_S, build_tree, role_end, run_tree
from ratchet.types import RoleKind

ALL: tuple[tuple[RoleKind, str], ...] = (
    ("registry", "registry"),
    ("buffer", "buffer"),
    ("trainer", "trainer-0"),
    ("rollout", "rollout-0"),
    ("rollout", "rollout-1"),
)


class Role:
    def __init__(self, name: str, diary: list[str]) -> None:
        self.name = name
        self.starts = 0
        self.hangs = False
        self._diary = diary
        self._end: asyncio.Future[End]

    async def start(self) -> None:
        self.starts += 1
        self._end = asyncio.get_running_loop().create_future()

    def end(self, status: str, detail: str = "") -> None:
        self.leave(RoleOutcome(status, detail))

    def leave(self, words: RoleOutcome) -> None:
        if not self._end.done():
            self._end.set_result(role_end(self.name, words))

    async def ended(self) -> End:
        return await asyncio.shield(self._end)

    async def stop(self) -> None:
        self._diary.append(self.name)
        if self.hangs:
            await asyncio.Event().wait()
        self.end("stopped")

    async def kill(self) -> None:
        self.end("failed", f"{self.name} died of signal 9")


class World:
    def __init__(self, roles: tuple[tuple[RoleKind, str], ...], **runtime: Any) -> None:
        self.stopped: list[str] = []
        self.told: list[str] = []
        self.log = RecordingLog()
        self.stop, self.kill = asyncio.Event(), asyncio.Event()
        self.roles = {name: Role(name, self.stopped) for _, name in roles}
        self.stops_of_training = 0
        self._has_trainer = "trainer-0" in self.roles
        root = build_tree(
            [(kind, self.roles[name]) for kind, name in roles],
            small_config(runtime=runtime),
            log=self.log,
            on_escalation=self._tell,
        )
        self.outcome = asyncio.ensure_future(
            run_tree(root, stop=self.stop, kill=self.kill, stop_training=self._stop_training)
        )

    async def _tell(self, cause: str) -> None:
        self.told.append(cause)

    def _stop_training(self) -> bool:
        self.stops_of_training += 1
        return self._has_trainer

    def __getitem__(self, name: str) -> Role:
        return self.roles[name]


def scenario(
    body: Callable[[World], Awaitable[Any] | None],
    roles: tuple[tuple[RoleKind, str], ...] = ALL,
    **runtime: Any,
) -> tuple[RoleOutcome, World]:
    async def main() -> tuple[RoleOutcome, World]:
        world = World(roles, **runtime)
        await asyncio.sleep(1)
        assert [role.starts for role in world.roles.values()] == [1] * len(roles)
        acting = body(world)
        if acting is not None:
            await acting
        return await world.outcome, world

    return run_virtual(main())


REVERSED = ["rollout-1", "rollout-0", "trainer-0", "buffer", "registry"]

# --- the whole run here


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


# --- cause and consequence


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


# --- stopping


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


# --- a part of the run here

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
