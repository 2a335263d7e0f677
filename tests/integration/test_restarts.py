"""kill -9 of the buffer and of the registry in the middle of a run: each starts again alone."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest
from tests.helpers.command import Command, kill
from tests.helpers.light_run import light_config

from ratchet.storage.ledger import read_groups
from ratchet.storage.versions import read_versions

pytestmark = pytest.mark.timeout(240)

NUM_STEPS = 16
CONFIG = light_config(
    task={"name": "copy", "args": {"digits": 3, "num_prompts": 40, "holdout": 14}},
    rollout={"max_tokens": 5, "group_size": 4},
    trainer={"num_steps": NUM_STEPS, "lr": 1e-3},
)


def die(command: Command, role: str, step: int) -> None:
    """Kill the process of a role once a step is taken."""
    command.until(f"step {step}", lambda: len(command.steps()) >= step)
    pid = command.events(f"{role}-0", "role_starting")[-1]["pid"]
    kill(pid, signal.SIGKILL)


def test_buffer_and_registry_start_again_alone(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with Command(CONFIG, root) as command:
        die(command, "buffer", 3)
        die(command, "registry", 7)
        die(command, "buffer", 10)
        code, output = command.finish()
    assert code == 0, output

    lives = {name: len(command.events(f"{name}-0", "role_starting")) for name in LIVES}
    assert lives == LIVES
    steps = [line["step"] for line in command.steps()]
    assert steps == list(range(1, NUM_STEPS + 1))
    versions = list(read_versions(root / "versions.sqlite"))
    assert [v.version for v in versions] == list(range(len(versions)))
    assert (versions[-1].step, {v.term for v in versions}) == (NUM_STEPS, {1})

    groups = list(read_groups(root / "ledger.sqlite"))
    trained = [group for group in groups if group.state in {"trained", "committed"}]
    assert Counter(g.trained_step for g in trained) == dict.fromkeys(steps, 4)
    ended = {"trained", "committed", "dropped"}
    ends = Counter((g.epoch, g.prompt_id) for g in groups if g.state in ended)
    assert set(ends.values()) == {1}


LIVES = {"buffer": 3, "registry": 2, "trainer": 1, "rollout": 1}
