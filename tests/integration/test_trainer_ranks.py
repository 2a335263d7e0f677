"""A trainer of two ranks under `ratchet run`: it trains, publishes and exports, and starts again as
a whole when a rank is killed.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from tests.helpers.command import Command, gone, kill
from tests.helpers.config import small_config
from tests.helpers.ledgers import versions_go_forward

from ratchet.config import CheckpointConfig, Config
from ratchet.storage.versions import read_versions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def config(num_steps: int) -> Config:
    return small_config(
        rollout={"max_tokens": 5, "group_size": 4},
        trainer={"num_steps": num_steps, "lr": 1e-3, "lr_warmup_steps": 0, "ranks_per_node": 2},
        warm_start={"steps": 2, "batch_size": 8},
        weights={"snapshot": True},  # all ranks gather, between their other calls; rank 0 keeps it
    )


def ranks(command: Command) -> list[psutil.Process]:
    """The processes of rank 0 and rank 1."""
    children = psutil.Process(command.child("trainer-0")).children()
    return sorted(children, key=lambda process: int(process.environ()["RANK"]))


def test_two_ranks_train_publish_and_export(tmp_path: Path) -> None:
    with Command(config(6), tmp_path / "run") as command:
        command.until("a first step", command.steps)
        code, output = command.finish(90)
    assert code == 0, output
    assert [line["step"] for line in command.steps()] == [1, 2, 3, 4, 5, 6]
    assert all(line["applied"] for line in command.steps())
    versions = list(read_versions(tmp_path / "run" / "versions.sqlite"))
    assert versions[-1].state == "live"
    assert {v.digest for v in versions if v.state == "live"} != {None}
    trained = load_file(tmp_path / "run" / "model" / "model.safetensors")
    base = load_file(tmp_path / "run" / "base" / "model.safetensors")
    assert trained.keys() == base.keys()
    assert any((trained[name] != base[name]).any() for name in base)
    (end,) = command.events("trainer-0.rank1", "rank_ended")
    assert end["status"] == "finished"


@pytest.mark.soak
def test_a_trainer_with_a_killed_rank_starts_again_as_a_whole(tmp_path: Path) -> None:
    saving = config(8).model_copy(update={"checkpoint": CheckpointConfig(every_steps=2)})
    with Command(saving, tmp_path / "run") as command:
        command.until("a third step", lambda: len(command.steps()) >= 3)
        two = ranks(command)
        assert len(two) == 2
        kill(two[1].pid)
        code, output = command.finish(90)
        assert gone(two, 1.0) == []
    assert code == 0, output
    (end,) = command.events("launcher-0", "child_ended")[:1]
    assert end["name"] == "trainer-0"
    assert "rank 1 of the trainer died of signal 9" in end["reason"]
    assert [line["step"] for line in command.steps()] == [1, 2, 3, 4, 5, 6, 7, 8]
    versions_go_forward(tmp_path / "run" / "versions.sqlite", terms={1, 2}, last_step=8)
