"""What the launcher starts, with what, and that it leaves nothing. The processes are small programs
in the place of roles; what their ends mean is tested with the tree.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
from tests.helpers.actors import RecordingLog
from tests.helpers.command import descendants
from tests.helpers.config import small_config

from ratchet.runtime import processes
from ratchet.runtime.child import RoleProcess
from ratchet.runtime.compose import role_names
from ratchet.runtime.placement import Placement, RankSpec, RoleSpec
from ratchet.runtime.processes import LocalSupervisor
from ratchet.runtime.role import RoleOutcome
from ratchet.runtime.rundir import create_run_directory
from ratchet.transport.mailbox.address import Address

if TYPE_CHECKING:
    import pytest

ROLE = """
import json, os, signal, sys

def says(status, detail=""):
    os.write(1, json.dumps({"status": status, "detail": detail}).encode())
    os._exit(0)

signal.signal(signal.SIGTERM, lambda *_: says("stopped"))
spec = json.loads(sys.stdin.readline())
print(json.dumps(spec), file=sys.stderr, flush=True)
for line in sys.stdin:
    says("finished", line.strip())
os._exit(1)
"""
KEY = bytes(range(32))


class World:
    """A launcher of a run with two workers, whose roles only read and write lines."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, ranks: RankSpec | None) -> None:
        self.config = small_config(rollout={"num_workers": 2, "max_tokens": 5})
        self.directory = create_run_directory(root, self.config)
        self.log = RecordingLog()
        self.told: list[str] = []
        self.commands: dict[str, list[str]] = {}
        self.stop, self.kill = asyncio.Event(), asyncio.Event()
        monkeypatch.setattr(processes, "RoleProcess", self._process)
        placement = Placement(
            roles=tuple(role_names(self.config)),
            run_dir=self.directory.root,
            run_id="run",
            registry=Address("unix", "/nowhere/registry.sock"),
            key=KEY,
            sockets=Path("/nowhere"),
            ranks=ranks,
        )
        self.supervisor = LocalSupervisor(
            self.config, self.directory, placement=placement, log=self.log, on_escalation=self._tell
        )

    def _process(
        self, name: str, *, command: Sequence[str], env: Mapping[str, str], **rest: Any
    ) -> Any:
        self.commands[name] = list(command)
        assert env["OMP_NUM_THREADS"] == "1"
        command = [sys.executable, "-I", "-S", "-c", ROLE]
        return RoleProcess(name, command=command, env=env, **rest)

    async def _tell(self, cause: str) -> None:
        self.told.append(cause)

    def pid(self, name: str) -> int:
        return [e["pid"] for e in self.log.named("process_started") if e["name"] == name][-1]

    def specs(self, name: str) -> list[RoleSpec]:
        log = name if "-" in name else f"{name}-0"
        lines = (self.directory.logs / f"{log}.err").read_text().splitlines()
        return [msgspec.json.decode(line, type=RoleSpec) for line in lines]


ROLES = ["registry", "buffer", "trainer-0", "rollout-0", "rollout-1"]


def scenario(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    body: Callable[[World], Awaitable[None] | None],
    ranks: RankSpec | None = None,
) -> tuple[RoleOutcome, World]:
    async def main() -> tuple[RoleOutcome, World]:
        world = World(root / "run", monkeypatch, ranks)
        running = asyncio.ensure_future(world.supervisor.run(world.stop, world.kill))
        async with asyncio.timeout(60):
            await until(lambda: all(has_read(world, name) for name in ROLES))
            acting = body(world)
            if acting is not None:
                await acting
            return await running, world

    outcome = asyncio.run(main())
    assert descendants() == []
    return outcome


def has_read(world: World, name: str) -> bool:
    log = name if "-" in name else f"{name}-0"
    path = world.directory.logs / f"{log}.err"
    return path.exists() and path.read_text().endswith("\n")


def has_started(world: World, name: str, times: int) -> bool:
    return has_read(world, name) and len(world.specs(name)) == times


async def until(happened: Callable[[], bool]) -> None:
    def poll() -> None:
        while not happened():
            time.sleep(0.01)  # nothing tells another process's files: there is no event to await

    await asyncio.to_thread(poll)


def until_all_are_dead(pids: Iterable[int]) -> None:
    """Block the loop, as a SIGSTOP of the process would, but know for how long."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_every_role_starts_in_order_with_a_spec_of_its_own_and_no_secret_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(world: World) -> None:
        for name in ROLES:
            process = psutil.Process(world.pid(name))
            assert os.getsid(process.pid) == process.pid
            assert KEY.hex() not in " ".join([*process.cmdline(), *process.environ().values()])
        world.stop.set()

    outcome, world = scenario(tmp_path, monkeypatch, body)
    assert outcome == RoleOutcome("finished", "stop")  # the trainer alone was told
    assert [e["name"] for e in world.log.named("process_started")] == ROLES
    specs = [spec for name in ROLES for spec in world.specs(name)]
    assert [spec.role.name for spec in specs] == ROLES
    assert len({spec.role.incarnation for spec in specs}) == 5
    assert {spec.key for spec in specs} == {KEY.hex()}
    assert KEY.hex() not in json.dumps(world.log.events, default=str)
    assert set(map(tuple, world.commands.values())) == {
        (sys.executable, "-m", "ratchet.runtime.role")
    }
    assert world.told == []


def test_a_trainer_of_several_ranks_is_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, world = scenario(tmp_path, monkeypatch, lambda w: w.kill.set(), RankSpec(2))
    modules = {name: command[-1] for name, command in world.commands.items()}
    assert modules.pop("trainer-0") == "ratchet.runtime.ranks"
    assert set(modules.values()) == {"ratchet.runtime.role"}
    (spec,) = world.specs("trainer-0")
    assert spec.ranks == RankSpec(2)


def test_a_killed_worker_is_another_process_and_another_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World) -> None:
        victim = world.pid("rollout-1")
        os.kill(victim, signal.SIGKILL)
        await until(lambda: world.pid("rollout-1") != victim)
        await until(lambda: len(world.specs("rollout-1")) == 2)
        world.kill.set()

    outcome, world = scenario(tmp_path, monkeypatch, body)
    assert outcome == RoleOutcome("stopped", "interrupted")
    first, second = world.specs("rollout-1")
    assert first.role.incarnation != second.role.incarnation
    (ended,) = world.log.named("child_ended")
    assert ended["reason"] == f"rollout-1 died of signal 9; see {tmp_path}/run/logs/rollout-1.err"


def test_a_buffer_killed_too_often_is_the_cause_and_whoever_listens_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World) -> None:
        for life in range(1, 5):  # max_restarts is 3
            await until(partial(has_started, world, "buffer", life))
            os.kill(world.pid("buffer"), signal.SIGKILL)

    outcome, world = scenario(tmp_path, monkeypatch, body)
    assert outcome.status == "failed"
    cause = f"buffer died of signal 9; see {tmp_path}/run/logs/buffer-0.err (the first of 4 ends"
    assert outcome.detail.startswith(cause)
    assert world.told == [outcome.detail]


def test_a_launcher_that_was_stopped_counts_no_time_against_its_roles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it stands still two workers die: on waking it hears of both, and starts both again."""

    async def body(world: World) -> None:
        victims = {name: world.pid(name) for name in ("rollout-0", "rollout-1")}
        until_all_are_dead(victims.values())
        await until(lambda: all(world.pid(name) != pid for name, pid in victims.items()))
        world.kill.set()

    outcome, world = scenario(tmp_path, monkeypatch, body)
    assert outcome == RoleOutcome("stopped", "interrupted")
    assert len(world.log.named("process_started")) == 7
    assert world.log.named("child_killed") == []


def test_a_stop_outlives_the_life_of_the_trainer_that_it_was_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World) -> None:
        trainer = world.pid("trainer-0")
        os.kill(trainer, signal.SIGSTOP)  # it will not read it
        world.stop.set()
        await until(lambda: world.supervisor._stops_training)
        os.kill(trainer, signal.SIGKILL)

    outcome, world = scenario(tmp_path, monkeypatch, body)
    assert outcome == RoleOutcome("finished", "stop")
    assert len(world.specs("trainer-0")) == 2
