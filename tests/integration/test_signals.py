"""Whatever ends the launcher, nothing is left ten seconds later; a dead worker is not the end."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.helpers.command import Command, gone, kill
from tests.helpers.config import small_config
from tests.helpers.light_run import light_config

from ratchet.storage.versions import read_versions

if TYPE_CHECKING:
    import psutil

pytestmark = pytest.mark.timeout(240)

CONFIG = light_config(
    rollout={"max_tokens": 5, "group_size": 4, "num_workers": 2},
    trainer={"num_steps": 100_000, "lr": 1e-3},
)
NUM_PROCESSES = 2 + 3 + 2
"""the launcher and its reaper, three roles, two workers"""

REWARD = """
import functools, subprocess, threading

lock = threading.Lock()

@functools.cache
def sandbox():
    return subprocess.Popen(["sleep", "1000"])

def reward(prompt, completion):
    with lock:
        sandbox()
    return float(len(completion))
"""


def test_a_worker_killed_in_the_middle_is_replaced_and_the_run_ends_on_sigterm(
    tmp_path: Path,
) -> None:
    """With a real model: in a launched run it is seen that the others go on meanwhile."""
    config = small_config(trainer={"num_steps": 100_000, "lr": 1e-3})
    with Command(config, tmp_path / "run") as command:
        command.until("a second step", lambda: len(command.steps()) >= 2)
        victim = command.child("rollout-0")
        kill(victim)
        command.until("a new worker", lambda: command.child("rollout-0") != victim)
        died_at = len(command.steps())
        command.until("more steps", lambda: len(command.steps()) >= died_at + 5)
        loads = command.events("rollout-0", "weights_loaded")
        first = next(load for load in loads if load["pid"] == command.child("rollout-0"))
        left = command.events("registry-0", "role_left")
        assert [e["name"] for e in left] == ["rollout-0"]
        family = command.family()
        assert len(family) == NUM_PROCESSES - 1
        kill(command.process.pid, signal.SIGTERM)
        code, output = command.finish(10.0)
        assert gone(family[1:], 1.0) == []
    assert code == 128 + signal.SIGTERM, output
    versions = list(read_versions(tmp_path / "run" / "versions.sqlite"))
    assert [v.version for v in versions] == list(range(len(versions)))
    assert versions[first["version"]].state == "live"


def sleeping(command: Command) -> list[psutil.Process]:
    """The sandboxes of the run."""
    return [process for process in command.family() if process.name() == "sleep"]


def owner(sandbox: psutil.Process) -> int:
    """The worker above the process that scores and its keeper."""
    return sandbox.parents()[2].pid


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.soak), signal.SIGKILL]
)
def test_nothing_outlives_the_launcher_not_even_what_a_reward_has_started(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    reward = {"reward": f"{tmp_path}/reward.py:reward", "reward_workers": 1}
    task = CONFIG.task.model_copy(update=reward)
    with Command(CONFIG.model_copy(update={"task": task}), tmp_path / "run") as command:
        command.until("a second step", lambda: len(command.steps()) >= 2)
        workers = {command.child(f"rollout-{rank}") for rank in (0, 1)}
        command.until("a sandbox in each", lambda: workers == {owner(p) for p in sleeping(command)})
        family = command.family()
        assert len(family) == NUM_PROCESSES + 3 * len(workers)
        if number == signal.SIGKILL:  # one that stands still cannot see that its launcher is gone
            kill(command.child("rollout-1"), signal.SIGSTOP)
        kill(command.process.pid, number)
        code, _ = command.finish(10.0)
        left = gone(family[1:], 10.0)
        for process in left:
            process.kill()
        assert left == []
    assert code == (130 if number == signal.SIGINT else -signal.SIGKILL)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["registry", "buffer"])
def test_a_role_that_dies_for_good_ends_the_run_with_the_first_cause(
    tmp_path: Path, name: str
) -> None:
    """All the others lose a dead registry within a second, and say so."""
    never = CONFIG.runtime.model_copy(update={"max_restarts": 0})
    with Command(CONFIG.model_copy(update={"runtime": never}), tmp_path / "run") as command:
        command.until("a first step", lambda: command.steps())
        family = command.family()
        kill(command.child(name))
        code, output = command.finish(60)
        assert gone(family[1:], 10.0) == []
    assert code == 1
    last = output.strip().splitlines()[-1]
    assert last.startswith(f"the run failed: {name} died of signal 9; see ")
