"""`ratchet run` with an adapter, real processes and two ranks: only the adapter is published."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.command import Command
from tests.helpers.config import small_config

from ratchet.backends.models import load_model
from ratchet.storage.versions import read_versions

pytestmark = [pytest.mark.soak, pytest.mark.timeout(240)]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's own
def test_two_ranks_train_publish_and_export_an_adapter(tmp_path: Path) -> None:
    build = small_config().model.model_dump(exclude_none=True)
    config = small_config(
        model=build | {"lora": {"rank": 4, "alpha": 8, "export_merged": True}},
        trainer={"num_steps": 6, "lr": 1e-2, "lr_warmup_steps": 0, "ranks_per_node": 2},
        warm_start={"steps": 2, "batch_size": 8},
    )
    directory = tmp_path / "run"
    with Command(config, directory) as command:
        code, output = command.finish(120)
    assert code == 0, output
    assert [line["applied"] for line in command.steps()] == [True] * 6
    live = [v.digest for v in read_versions(directory / "versions.sqlite") if v.state == "live"]
    assert len(live) == len(set(live)) == 7
    adapter = load_file(directory / "model" / "adapter_model.safetensors")
    assert all(weight.any() for weight in adapter.values())
    base = load_model(directory / "base", "float32")
    adapted = peft.PeftModel.from_pretrained(base, directory / "model")
    merged = load_model(directory / "model" / "merged", "float32")
    ids = torch.tensor([[3, 4, 5, 13, 3]])
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=0.0, atol=1e-5)
