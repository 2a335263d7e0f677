"""The supervisor's judgement; that it starts and ends real processes is proved in integration."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.helpers.actors import RecordingLog
from tests.helpers.config import small_config
from tests.simulation.loop import run_virtual

from ratchet.runtime import processes
from ratchet.runtime.processes import LocalSupervisor, Restarts
from ratchet.runtime.role import RoleOutcome, RoleSpec
from ratchet.runtime.rundir import create_run_directory

# --- the window


def test_so_many_restarts_within_the_window_and_no_more() -> None:
    restarts = Restarts(max_restarts=2, window_s=60.0)
    restarts.note_start(0.0)
    assert not restarts.exhausted(10.0)  # the first restart
    restarts.note_start(10.0)
    assert not restarts.exhausted(20.0)  # the second
    restarts.note_start(20.0)
    assert restarts.recent(30.0) == 3
    assert restarts.exhausted(30.0)


def test_what_lies_before_the_window_is_forgotten() -> None:
    restarts = Restarts(max_restarts=1, window_s=60.0)
    for now in (0.0, 61.0, 122.0):
        assert not restarts.exhausted(now)
        restarts.note_start(now)
    restarts.note_start(132.0)
    assert restarts.exhausted(182.0)  # the edge belongs to the window
    assert not restarts.exhausted(182.1)


def test_no_restarts_allowed_means_the_first_death_is_the_last() -> None:
    restarts = Restarts(max_restarts=0, window_s=60.0)
    restarts.note_start(0.0)
    assert restarts.exhausted(59.0)


# --- the supervisor, with processes that only the test knows


class Stream:
    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.data = b""

    def write(self, line: bytes) -> None:
        self.lines.append(line)

    def is_closing(self) -> bool:
        return False

    async def read(self) -> bytes:
        return self.data


class Process:
    """Ends when the test says so, or when it is told to."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stdin, self.stdout = Stream(), Stream()
        self.returncode: int | None = None
        self.signals: list[str] = []
        self.stubborn = False
        self._ended = asyncio.Event()

    @property
    def spec(self) -> RoleSpec:
        return msgspec.json.decode(self.stdin.lines[0], type=RoleSpec)

    def end(self, outcome: RoleOutcome | None = None, code: int = 0) -> None:
        self.stdout.data = b"" if outcome is None else msgspec.json.encode(outcome)
        self.returncode = code
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        self.signals.append("term")
        if not self.stubborn:
            self.end(RoleOutcome("stopped"))

    def kill(self) -> None:
        self.signals.append("kill")
        self.end(code=-9)


class World:
    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, **runtime: Any) -> None:
        self.config = small_config(runtime=runtime, rollout={"num_workers": 2, "max_tokens": 5})
        self.started: list[Process] = []
        self.log = RecordingLog()
        self.stop, self.kill = asyncio.Event(), asyncio.Event()
        monkeypatch.setattr(asyncio, "create_subprocess_exec", self._create)
        self.supervisor = LocalSupervisor(
            self.config, create_run_directory(root, self.config), run_id="run", log=self.log
        )
        self.outcome = asyncio.ensure_future(self.supervisor.run(self.stop, self.kill))

    async def _create(self, *args: str, **kwargs: Any) -> Process:
        assert args[1:] == ("-m", "ratchet.runtime.role")  # no secrets in argv
        assert kwargs["start_new_session"]
        process = Process(len(self.started))
        self.started.append(process)
        return process

    def newest(self, name: str) -> Process:
        return [p for p in self.started if p.spec.role.name == name][-1]

    async def settle(self) -> None:
        await asyncio.sleep(0.01)


def scenario(
    root: Path, monkeypatch: pytest.MonkeyPatch, body: Callable[[World], Any], **runtime: Any
) -> None:
    async def main() -> str:
        world = World(root / "run", monkeypatch, **runtime)
        await world.settle()
        await body(world)
        assert world.outcome.done()
        assert all(process.returncode is not None for process in world.started)
        return world.started[0].spec.sockets

    assert not Path(run_virtual(main())).exists()


def test_every_role_starts_and_the_trainers_end_is_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World) -> None:
        specs = [process.spec for process in world.started]
        assert [(s.role.kind, s.role.name) for s in specs] == [
            ("registry", "registry"), ("buffer", "buffer"), ("trainer", "trainer-0"),
            ("rollout", "rollout-0"), ("rollout", "rollout-1"),
        ]  # fmt: skip
        assert len({s.role.incarnation for s in specs}) == 5
        assert len({s.key for s in specs}) == 1
        assert len(specs[0].key) == 64
        assert str(specs[0].key) not in str(world.log.events)
        world.newest("trainer-0").end(RoleOutcome("stopped"))
        assert await world.outcome == RoleOutcome("stopped")
        assert all(p.signals == ["term"] for p in world.started if p is not world.started[2])

    scenario(tmp_path, monkeypatch, body)


def test_a_dead_rollout_is_started_again_until_its_budget_is_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World) -> None:
        lives = set()
        for _ in range(3):
            process = world.newest("rollout-1")
            lives.add(process.spec.role.incarnation)
            process.end(code=-9)
            await asyncio.sleep(1)
        assert len(lives) == 3
        outcome = await world.outcome
        assert outcome.status == "failed"
        assert "rollout-1 died 3 times within 60 s (runtime.max_restarts)" in outcome.detail
        assert "rollout-1 died of signal 9; see" in outcome.detail
        assert len(world.started) == 7

    scenario(tmp_path, monkeypatch, body, max_restarts=2)


def test_deaths_far_apart_never_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(world: World) -> None:
        for _ in range(6):
            await asyncio.sleep(61)
            world.newest("rollout-0").end(RoleOutcome("failed", "x"), code=1)
            await world.settle()
        assert not world.outcome.done()
        world.newest("trainer-0").end(RoleOutcome("stopped"))
        assert (await world.outcome).status == "stopped"

    scenario(tmp_path, monkeypatch, body, max_restarts=1)


@pytest.mark.parametrize("name", ["registry", "buffer", "trainer-0"])
def test_the_death_of_any_other_role_is_the_cause_of_the_runs_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async def body(world: World) -> None:
        world.newest(name).end(RoleOutcome("failed", "LedgerError: x"), code=1)
        outcome = await world.outcome
        assert outcome.status == "failed"
        assert "LedgerError: x" in outcome.detail
        assert len(world.started) == 5

    scenario(tmp_path, monkeypatch, body)


def test_what_the_user_must_mend_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World) -> None:
        refusal = RoleOutcome("user_error", "model.path = 'x' cannot be loaded")
        world.newest("rollout-0").end(refusal, code=2)
        assert await world.outcome == refusal
        assert len(world.started) == 5

    scenario(tmp_path, monkeypatch, body)


def test_a_stop_is_told_to_the_trainer_alone_and_a_kill_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World) -> None:
        world.stop.set()
        await world.settle()
        assert [p.spec.role.name for p in world.started if b"stop\n" in p.stdin.lines] == [
            "trainer-0"
        ]
        assert world.newest("trainer-0").stdin.lines[1:] == [b"stop\n"]  # once
        assert not world.outcome.done()
        world.kill.set()
        assert await world.outcome == RoleOutcome("stopped", "interrupted")

    scenario(tmp_path, monkeypatch, body)


def test_who_ignores_the_signal_is_killed_before_ten_seconds_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World) -> None:
        world.newest("rollout-1").stubborn = True
        started = asyncio.get_running_loop().time()
        world.kill.set()
        await world.outcome
        assert asyncio.get_running_loop().time() - started == processes._TERM_S < 10
        assert world.newest("rollout-1").signals == ["term", "kill"]
        assert world.log.named("process_killed") == [{"name": "rollout-1"}]

    scenario(tmp_path, monkeypatch, body)
