"""The exported model is that of the checkpoint, bit for bit; what cannot be exported is said."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.config import small_config
from tests.helpers.training import make_groups
from typer.testing import CliRunner

from ratchet import cli_audit
from ratchet.backends.training.fsdp import FsdpBackend
from ratchet.config import Config
from ratchet.errors import ConfigError, UserError
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.base_model import ensure_base_model
from ratchet.runtime.export import export_checkpoint
from ratchet.runtime.rundir import create_run_directory
from ratchet.storage.checkpoint import CheckpointFacts
from ratchet.storage.checkpoints import Checkpoints

STEPS = (1, 2)


def model_of(path: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in path.glob("*.safetensors") for n, t in load_file(file).items()}


async def train(run: RunDirectory, config: Config) -> None:
    """Take steps; write a checkpoint after each, and beside it what it must export to."""
    backend = FsdpBackend(ensure_base_model(config, run.base), config=config, device="cpu")
    await backend.start()
    checkpoints = Checkpoints(run.checkpoints, keep=9)
    for step in STEPS:
        await backend.forward_backward(make_groups(2, 4, seed=step))
        await backend.optimizer_step()
        await backend.begin_save(checkpoints.begin(step))
        await backend.end_save()
        checkpoints.finish(CheckpointFacts("r", step, step, 1, "", None, 1.0))
        await backend.export(run.root / f"expected-{step}")
    await backend.close()


def make_run(root: Path, **sections: Any) -> RunDirectory:
    config = small_config(trainer={"num_steps": 3, "lr": 1e-2, "lr_warmup_steps": 0}, **sections)
    run = create_run_directory(root, config)
    asyncio.run(train(run, config))
    return run


@pytest.fixture(scope="module", params=[None, 2], ids=["full", "lora"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    root = tmp_path_factory.mktemp("export") / "run"
    return (
        make_run(root)
        if request.param is None
        else make_run(root, model={"lora": {"rank": request.param}})
    )


def test_the_model_of_any_checkpoint(run: RunDirectory, tmp_path: Path) -> None:
    assert export_checkpoint(run.root, tmp_path / "newest").step == 2
    assert export_checkpoint(run.root, tmp_path / "first", 1).version == 1
    for name, step in (("newest", 2), ("first", 1)):
        found, expected = model_of(tmp_path / name), model_of(run.root / f"expected-{step}")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        files = {path.name for path in (tmp_path / name).iterdir()}
        assert files == {path.name for path in (run.root / f"expected-{step}").iterdir()}
    first, newest = model_of(tmp_path / "first"), model_of(tmp_path / "newest")
    assert any(not torch.equal(first[key], newest[key]) for key in first)


def test_the_command(run: RunDirectory, tmp_path: Path) -> None:
    output = tmp_path / "model"
    arguments = ["export", str(run.root), str(output), "--step", "1"]
    result = CliRunner().invoke(cli_audit.app, arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{output}: version 1, step 1\n"
    assert output.is_dir()


def test_what_cannot_be_exported_is_said(run: RunDirectory, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    with pytest.raises(ConfigError, match="is there already"):
        export_checkpoint(run.root, there)
    with pytest.raises(UserError, match=r"no checkpoint of step 7.* steps 1, 2"):
        export_checkpoint(run.root, tmp_path / "out", 7)
    with pytest.raises(UserError, match="holds no run"):
        export_checkpoint(there, tmp_path / "out")
    (there / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot export .* check both"):
        export_checkpoint(run.root, there / "file" / "out")
    state = next((run.checkpoints / "version-00000002").glob("*.safetensors"))
    whole = state.read_bytes()
    state.write_bytes(whole[:-1])
    with pytest.raises(UserError, match="is damaged"):
        export_checkpoint(run.root, tmp_path / "out")
    state.write_bytes(whole)
    assert not (tmp_path / "out").exists()
