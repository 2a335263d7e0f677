"""A run that is killed and resumed ends with the weights of one that was not, bit for bit.

The run under test is an ordinary one: its backend only writes down what it trains. Afterwards a
second run, which nobody kills, trains the same groups in the same order.
"""

from __future__ import annotations

import signal
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.command import Command, gone, kill
from tests.helpers.config import small_config
from tests.helpers.recorded_backend import RECORD, read_step

from ratchet.config import Config
from ratchet.storage.checkpoints import Checkpoints
from ratchet.storage.ledger import read_groups

NUM_STEPS, KILLED_FROM = 40, 20


def config(backend: str) -> Config:
    return small_config(
        task={"name": "copy", "args": {"digits": 3, "num_prompts": 40, "holdout": 14}},
        trainer={
            "backend": f"tests.helpers.recorded_backend:{backend}",
            "num_steps": NUM_STEPS,
            "lr": 1e-3,
            "lr_warmup_steps": 30,  # the schedule has to go on as well
            "weight_decay": 0.01,
            "micro_batch_tokens": 64,  # several a step: the order within a batch counts
        },
        warm_start={"steps": 3, "batch_size": 8},
        checkpoint={"every_steps": KILLED_FROM},
    )


def trained(root: Path) -> dict[int, set[int]]:
    """The groups of each step, as the ledger has them."""
    steps = defaultdict(set)
    for group in read_groups(root / "ledger.sqlite"):
        if group.state in {"trained", "committed"}:
            steps[group.trained_step].add(group.group_id)
    return steps


def state(root: Path) -> dict[str, torch.Tensor]:
    """Model and optimiser, as the last checkpoint has them."""
    found = Checkpoints(root / "checkpoints", keep=9).find(NUM_STEPS)
    (file,) = found.path.glob("*.safetensors")
    return {name: t for name, t in load_file(file).items() if not name.startswith("random.")}


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_killed_and_resumed_run_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "record"
    record.mkdir()
    monkeypatch.setenv(RECORD, str(record))

    killed = tmp_path / "killed"
    with Command(config("Recording"), killed) as command:
        command.until(
            "a checkpoint, and steps past it",
            lambda: (
                command.events("trainer-0", "checkpoint_written")
                and len(command.steps()) > KILLED_FROM + 1
            ),
        )
        family = command.family()
        kill(command.process.pid, signal.SIGKILL)
        command.finish(10.0)
        assert gone(family[1:], 15.0) == []
    assert len(command.steps()) < NUM_STEPS
    with Command(None, killed) as command:
        code, output = command.finish(300)
    assert code == 0, output
    (restored,) = command.events("trainer-0", "restored")
    assert restored["step"] == KILLED_FROM
    assert [line["step"] for line in command.steps()] == list(range(1, NUM_STEPS + 1))
    batches = {step: read_step(record, step) for step in range(1, NUM_STEPS + 1)}
    assert {step: {g.group_id for g in batch} for step, batch in batches.items()} == trained(killed)

    whole = tmp_path / "whole"
    with Command(config("Replaying"), whole) as command:
        code, output = command.finish(300)
    assert code == 0, output
    assert command.events("trainer-0", "restored") == []

    left, right = state(killed), state(whole)
    assert left.keys() == right.keys()
    assert any(name.startswith("optimizer.") for name in left)
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
    base = load_file(whole / "base" / "model.safetensors")
    assert any(not torch.equal(left[f"model.{name}"], base[name]) for name in base)
