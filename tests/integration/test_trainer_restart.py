"""kill -9 of the trainer of a run, again and again: the others wait, and the run goes on."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest
from tests.helpers.command import Command, kill
from tests.helpers.config import small_config
from tests.helpers.ledgers import each_prompt_counts_once, versions_go_forward

pytestmark = [pytest.mark.soak, pytest.mark.timeout(240)]

NUM_STEPS = 16
CONFIG = small_config(
    task={"name": "copy", "args": {"digits": 3, "num_prompts": 40, "holdout": 14}},
    rollout={"max_tokens": 5, "group_size": 4},
    trainer={"num_steps": NUM_STEPS, "lr": 1e-3},
    checkpoint={"every_steps": 3, "keep": 2},
    runtime={"max_restarts": 5},
)


def test_a_run_whose_trainer_is_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with Command(CONFIG, root) as command:
        for num_steps in (1, 9):  # before the first checkpoint, and behind one
            command.until(f"step {num_steps}", lambda n=num_steps: len(command.steps()) >= n)
            victim = command.child("trainer-0")
            kill(victim, signal.SIGKILL)
            command.until("a new life", lambda v=victim: command.child("trainer-0") != v)
        code, output = command.finish()
    assert code == 0, output
    started = Counter(event["name"] for event in command.events("launcher-0", "process_started"))
    assert started.pop("trainer-0") == 3
    assert set(started.values()) == {1}  # nobody else
    (restored,) = command.events("trainer-0", "restored")
    assert restored["step"] in {6, 9, 12}

    assert [line["step"] for line in command.steps()] == list(range(1, NUM_STEPS + 1))
    lost = (root / "metrics.lost.jsonl").read_text().splitlines()
    assert json.loads(lost[0])["step"] == 1  # of the first life, which had no checkpoint
    assert json.loads((root / "summary.json").read_bytes())["status"] == "finished"
    versions_go_forward(root / "versions.sqlite", last_step=NUM_STEPS, terms={1, 2, 3})
    each_prompt_counts_once(
        root / "ledger.sqlite", num_steps=NUM_STEPS, batch_groups=4, num_prompts=26
    )
