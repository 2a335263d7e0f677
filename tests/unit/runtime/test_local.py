"""When a run in one process ends, and how. That it trains is proved in integration."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.actors import RecordingLog
from tests.helpers.config import small_config
from tests.simulation.loop import run_virtual

from ratchet.actors.actor import Actor, LocalRef
from ratchet.actors.system import System
from ratchet.errors import ConfigError
from ratchet.messages import RunEnded, StopTraining
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime import local
from ratchet.runtime.role import RoleOutcome
from ratchet.types import RoleInfo


class Dummy(Actor[StopTraining]):
    """Ends when the test says so, or in order when it is told to stop."""

    def __init__(self, system: System, name: str, ended: list[str]) -> None:
        super().__init__(system, name)
        self._ended = ended
        self.hangs = False

    def receive(self, message: StopTraining) -> None:
        match message:
            case StopTraining():
                self._ended.append(f"{self.name}: {message.reason}")
                self.system.run_ended = RunEnded("stopped", message.reason)
                self.stop()

    async def fail(self, error: Exception) -> None:
        raise error

    async def on_stop(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        self._ended.append(self.name)


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refs: dict[str, LocalRef] = {}
        self.lives: dict[str, list[str]] = {}
        self.ended: list[str] = []
        self.stop, self.kill = asyncio.Event(), asyncio.Event()
        monkeypatch.setattr(local, "start_role", self._start_role)
        self.refuses: str | None = None

    def _start_role(self, system: System, role: RoleInfo, **kwargs: Any) -> LocalRef:
        if role.name == self.refuses:
            raise ConfigError(f"{role.name} cannot start")
        self.lives.setdefault(role.name, []).append(role.incarnation)
        ref = self.refs[role.name] = Dummy.start(system, role.name, self.ended)
        return ref

    def actor(self, name: str) -> Any:
        return self.refs[name]._actor_weakref()

    async def fail(self, name: str, error: Exception) -> None:
        actor = self.actor(name)
        actor.spawn(actor.fail(error), name="work")
        await asyncio.sleep(2)

    def run(self, **runtime: Any) -> asyncio.Future[RoleOutcome]:
        return asyncio.ensure_future(
            local.run_in_process(
                small_config(runtime=runtime),
                RunDirectory(Path("unused")),
                run_id="run",
                task=None,  # type: ignore[arg-type]  # no role looks at it
                log=RecordingLog(),
                stop=self.stop,
                kill=self.kill,
            )
        )


def scenario(
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[World], Awaitable[None] | None],
    **runtime: Any,
) -> tuple[RoleOutcome, World]:
    async def main() -> tuple[RoleOutcome, World]:
        world = World(monkeypatch)
        outcome = world.run(**runtime)
        await asyncio.sleep(1)
        assert list(world.refs) == ROLES
        assert not outcome.done()
        acted = act(world)
        if acted is not None:
            await acted
        async with asyncio.timeout(100):
            return await outcome, world

    return run_virtual(main())


def test_the_trainers_end_ends_all_and_the_registry_last(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, world = scenario(monkeypatch, lambda w: w.refs["trainer-0"].tell(StopTraining("x")))
    assert outcome == RoleOutcome("finished", "x")
    assert world.ended == ["trainer-0: x", "trainer-0", "rollout-0", "buffer", "registry"]


ROLES = ["registry", "buffer", "trainer-0", "rollout-0"]


@pytest.mark.parametrize("name", ROLES)
def test_a_role_that_fails_without_a_restart_left_is_the_outcome(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    outcome, world = scenario(
        monkeypatch, lambda w: w.fail(name, ValueError("why")), max_restarts=0
    )
    assert outcome == RoleOutcome("failed", f"{name}: ValueError: why")
    assert all(not ref.is_alive() for ref in world.refs.values())


@pytest.mark.parametrize("name", ROLES)
def test_a_role_that_fails_is_started_again_alone_as_another_life(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async def act(world: World) -> None:
        first = world.refs[name]
        await world.fail(name, ValueError("why"))
        assert world.refs[name] is not first
        assert world.refs[name].is_alive()
        assert len(set(world.lives[name])) == 2
        world.kill.set()

    outcome, world = scenario(monkeypatch, act)
    assert outcome == RoleOutcome("stopped", "interrupted")
    assert [len(lives) for lives in world.lives.values()] == [1 + (r == name) for r in ROLES]


def test_a_worker_that_fails_too_often_is_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(world: World) -> None:
        await world.fail("rollout-0", ValueError("first"))
        await world.fail("rollout-0", ValueError("second"))

    outcome, _ = scenario(monkeypatch, act, max_restarts=1)
    assert outcome.status == "failed"
    assert outcome.detail.startswith("rollout-0: ValueError: first (the first of 2 ends of workers")


def test_what_a_role_finds_wrong_with_the_configuration_is_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcome, world = scenario(
        monkeypatch, lambda w: w.fail("rollout-0", ConfigError("model.path: no"))
    )
    assert outcome == RoleOutcome("user_error", "model.path: no")
    assert len(world.lives["rollout-0"]) == 1


def test_another_role_that_stops_by_itself_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, _ = scenario(
        monkeypatch, lambda w: w.refs["buffer"].stop(block=False) and None, max_restarts=0
    )
    assert outcome == RoleOutcome("failed", "buffer was stopped from outside")


def test_a_stop_is_told_to_the_trainer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, world = scenario(monkeypatch, lambda w: w.stop.set())
    assert outcome == RoleOutcome("finished", "asked to stop")
    assert [line for line in world.ended if ":" in line] == ["trainer-0: asked to stop"]


def test_a_stop_reaches_a_trainer_that_is_about_to_start_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def act(world: World) -> None:
        first = world.refs["trainer-0"]
        actor = world.actor("trainer-0")
        actor.spawn(actor.fail(ValueError("why")), name="work")
        while first.is_alive():  # noqa: ASYNC110 - nothing else tells of it in that moment
            await asyncio.sleep(0)
        assert world.refs["trainer-0"] is first  # the next one is still to come
        world.stop.set()

    outcome, world = scenario(monkeypatch, act)
    assert outcome == RoleOutcome("finished", "asked to stop")
    assert len(world.lives["trainer-0"]) == 2


def test_a_kill_ends_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, world = scenario(monkeypatch, lambda w: w.kill.set())
    assert outcome == RoleOutcome("stopped", "interrupted")
    assert world.ended == ["rollout-0", "trainer-0", "buffer", "registry"]


def test_a_role_that_hangs_keeps_neither_the_others_nor_the_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def act(world: World) -> None:
        world.actor("trainer-0").hangs = True
        world.kill.set()

    outcome, world = scenario(monkeypatch, act)
    assert outcome == RoleOutcome("stopped", "interrupted")
    assert world.ended == ["rollout-0", "buffer", "registry"]


def test_a_role_that_refuses_to_start_takes_the_others_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> tuple[RoleOutcome, World]:
        world = World(monkeypatch)
        world.refuses = "trainer-0"
        return await world.run(), world

    outcome, world = run_virtual(main())
    assert outcome == RoleOutcome("user_error", "trainer-0 cannot start")
    assert world.ended[-2:] == ["buffer", "registry"]
