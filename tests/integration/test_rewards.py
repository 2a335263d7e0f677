"""`ratchet run` with a reward that does all that a reward must not do, depending on the prompt."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from tests.helpers import rewards
from tests.helpers.command import Command
from tests.helpers.light_run import light_config

from ratchet.storage.ledger import read_groups

pytestmark = pytest.mark.timeout(120)

BAD = {
    "loop": "reward_timeout",
    "raise": "reward_raised",
    "exit": "reward_exited",
    "_exit": "reward_exited",
    "fork": "reward_forked",
    "memory": "reward_memory",
    "none": "reward_invalid",
    "nan": "reward_invalid",
    "string": "reward_invalid",
}


def test_a_run_goes_on_whatever_a_reward_does(tmp_path: Path) -> None:
    words = [*BAD, *(f"good-{number}" for number in range(9))]
    lines = [{"id": word, "prompt": f"{n}>"} for n, word in enumerate(words)]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)))
    config = light_config(
        task={
            "name": "jsonl",
            "args": {"path": str(data)},
            "reward": f"{rewards.__file__}:reward_by_id",
            "reward_timeout_s": 0.5,
        },
        trainer={"num_steps": 5},
        eval={"num_prompts": 0},
    )
    with Command(config, tmp_path / "run") as command:
        code, output = command.finish(100)
    assert code == 0, output
    assert [step["step"] for step in command.steps()] == [1, 2, 3, 4, 5]
    dropped = sum((Counter(step["buffer/dropped"]) for step in command.steps()), Counter())
    assert set(BAD.values()) <= dropped.keys()
    groups = list(read_groups(tmp_path / "run" / "ledger.sqlite"))
    reasons = {(group.prompt_id, group.reason) for group in groups if group.state == "dropped"}
    assert BAD.items() <= reasons
    trained = {group.prompt_id for group in groups if group.state in {"trained", "committed"}}
    assert trained
    assert all(prompt_id.startswith("good") for prompt_id in trained)
    for event in command.events("rollout-0", "reward_process_started"):
        until_gone(event["pid"])


def until_gone(keeper: int) -> None:
    """A number that another program has by now is as good."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            if not any("reward_keeper" in word for word in psutil.Process(keeper).cmdline()):
                return
        except psutil.Error:
            return
        time.sleep(0.02)  # nothing tells of a process of a process that has ended
    raise AssertionError(f"process {keeper} is left")
