"""The training backend with an adapter: what is trained, and what is exported."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.fsdp_runs import run
from tests.helpers.training import copy_prompts, make_groups, training_config, write_model
from transformers import AutoTokenizer

from ratchet.backends.models import load_model
from ratchet.backends.named_weights import named_weights
from ratchet.backends.training.fsdp import FsdpBackend
from ratchet.config import Config
from ratchet.errors import UserError

IDS = torch.tensor([[3, 4, 5, 13, 3]])


def lora_config(*, dtype: str = "float32", **lora: Any) -> Config:
    model = training_config().model.model_dump(exclude_none=True)
    warm_start = {"steps": 60, "lr": 2e-2, "lr_warmup_steps": 0}
    return training_config(
        model=model | {"dtype": dtype, "lora": {"rank": 4, "alpha": 8} | lora},
        warm_start=warm_start,
        trainer={"lr": 0.05},
    )


async def train(backend: FsdpBackend) -> None:
    await backend.forward_backward(make_groups())
    assert (await backend.optimizer_step()).applied


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    result: torch.Tensor = model(IDS).logits
    return result


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_of_the_adapter_is_trained_and_nothing_else(base: Path, dtype: str) -> None:
    async def body(backend: FsdpBackend) -> None:
        model = backend._started._model
        before = {name: weight.clone() for name, weight in named_weights(model).items()}
        for _ in range(2):  # B is zero at first, so A has no gradient before the second step
            await train(backend)
        after = named_weights(model)
        changed = {name for name in after if not torch.equal(after[name], before[name])}
        assert changed == {name for name in after if ".lora_" in name}
        learner = backend._started
        assert {id(p) for p in learner._optimizer._parameters} == {
            id(after[name]) for name in changed
        }
        assert {spec.dtype for spec in backend.specs()[1:]} == {dtype}

    run(base, body, lora_config(dtype=dtype))


def test_a_warm_start_trains_the_adapter(base: Path) -> None:
    async def body(backend: FsdpBackend) -> None:
        model = backend._started._model
        embedding = model.get_input_embeddings().weight.clone()
        last = await backend.warm_start(copy_prompts())
        assert last["loss"] < 2.3  # as it was: ln 14 = 2.64, a uniform guess
        assert torch.equal(model.get_input_embeddings().weight, embedding)

    run(base, body, lora_config())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's own
def test_an_export_is_an_adapter_that_peft_reads(base: Path, tmp_path: Path) -> None:
    async def body(backend: FsdpBackend) -> None:
        await train(backend)
        await backend.export(tmp_path / "out")
        trained = backend._started._model
        names = [spec.name for spec in backend.specs()][1:]
        saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
        assert sorted(saved) == sorted(names)
        config = peft.LoraConfig.from_pretrained(tmp_path / "out")
        assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 8, 0.0)
        assert config.base_model_name_or_path == str(base)
        loaded = peft.PeftModel.from_pretrained(load_model(base, "float32"), tmp_path / "out")
        assert torch.equal(logits(loaded), logits(trained))
        assert not torch.equal(logits(load_model(base, "float32")), logits(trained))
        assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("07>") == [3, 10, 13]
        assert not (tmp_path / "out" / "merged").exists()

    run(base, body, lora_config())


def test_the_targets_are_exported_in_order(base: Path, tmp_path: Path) -> None:
    """PEFT keeps them as a set, whose order is another one in each process."""

    async def body(backend: FsdpBackend) -> None:
        await backend.export(tmp_path / "out")
        config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
        modules = {name.split(".lora_")[0] for name in (s.name for s in backend.specs()[1:])}
        names = [name.removeprefix("base_model.model.") for name in sorted(modules)]
        assert config["target_modules"] == names

    run(base, body, lora_config())


def test_merged_weights_are_exported_on_demand(base: Path, tmp_path: Path) -> None:
    async def body(backend: FsdpBackend) -> None:
        await train(backend)
        await backend.export(tmp_path / "out")
        merged = load_model(tmp_path / "out" / "merged", "float32")
        trained = backend._started._model
        torch.testing.assert_close(logits(merged), logits(trained), rtol=0.0, atol=1e-5)
        assert named_weights(merged).keys() == named_weights(load_model(base, "float32")).keys()
        assert AutoTokenizer.from_pretrained(tmp_path / "out" / "merged").encode("07>") == [
            3,
            10,
            13,
        ]
        await train(backend)  # the model in training was not merged
        assert not torch.equal(logits(merged), logits(trained))

    run(base, body, lora_config(export_merged=True))


def test_the_state_of_an_adapter_to_other_weights_is_refused(base: Path, tmp_path: Path) -> None:
    config = lora_config()
    another = training_config().model_copy(update={"seed": config.seed + 1})
    other = write_model(another, tmp_path / "other")
    saved = tmp_path / "saved"
    saved.mkdir()

    async def save(backend: FsdpBackend) -> None:
        await backend.begin_save(saved)
        await backend.end_save()

    async def restore(backend: FsdpBackend) -> None:
        await backend.restore(saved)

    run(base, save, config)
    run(base, restore, config)
    with pytest.raises(UserError, match=r"adapter to other weights than those in model\.path"):
        run(other, restore, config)
