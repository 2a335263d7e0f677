"""Ranks that share a model train as one process does: real processes, over gloo."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.training import write_model
from tests.helpers.training_rank import CONFIG, train, train_as

from ratchet.backends.models import load_model


def train_two(folder: Path) -> list[dict[str, Any]]:
    """Run rank 0 here and rank 1 as a process, to their ends; return what each wrote."""
    command = [sys.executable, "-m", "tests.helpers.training_rank", "1", "2", str(folder)]
    other = subprocess.Popen(command)
    try:
        train_as(0, 2, folder)
        assert other.wait(timeout=100) == 0
    finally:
        other.kill()
        other.wait()
    return [json.loads((folder / f"reports-2-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_two_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    write_model(CONFIG, tmp_path / "base")
    first, second = train_two(tmp_path)
    alone = json.loads(json.dumps(asyncio.run(train(tmp_path, 1))))

    assert first == second
    assert first["specs"] == alone["specs"]
    assert first["shapes"] == alone["shapes"]
    assert first["bad"] == alone["bad"] == [False, False]
    assert len(first["reports"]) == len(alone["reports"]) == 4
    for mine, theirs in zip(first["reports"], alone["reports"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert all(report["grad_norm"] > 0.5 for report in alone["reports"][1:])  # clipping took part

    sharded = load_file(tmp_path / "out-2" / "model.safetensors")
    whole = load_file(tmp_path / "out-1" / "model.safetensors")
    base = load_file(tmp_path / "base" / "model.safetensors")
    assert sharded.keys() == whole.keys() == base.keys()
    for name, value in whole.items():
        torch.testing.assert_close(sharded[name], value, rtol=0.0, atol=1e-5)
        assert (value - base[name]).abs().max() > 1e-4
    config = (tmp_path / "out-1" / "config.json").read_text()
    assert (tmp_path / "out-2" / "config.json").read_text() == config
    load_model(tmp_path / "out-2", "float32")
