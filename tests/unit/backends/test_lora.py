from __future__ import annotations

import sys
from pathlib import Path

import peft
import pytest
import torch
from tests.helpers.tiny_models import write_tiny_model

from ratchet.backends.lora import adapter_weights, add_adapter, base_digest
from ratchet.backends.models import load_model
from ratchet.config import LoraConfig
from ratchet.errors import ConfigError

IDS = torch.tensor([[3, 4, 5, 13, 3, 9, 8]])
SMALL = LoraConfig(rank=4, alpha=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    for model_type in ("qwen3", "gpt2", "llama"):
        write_tiny_model(folder / model_type, model_type)
    return folder


def scramble(model: torch.nn.Module) -> None:
    """Give the adapter values, B among them."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.3, generator=generator)


@pytest.mark.parametrize("model_type", ["qwen3", "gpt2", "llama"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_a_fresh_adapter_changes_nothing_until_it_has_values(
    folder: Path, model_type: str, dtype: str
) -> None:
    model = load_model(folder / model_type, dtype)
    before = model(IDS).logits
    add_adapter(model, SMALL, seed=0)
    assert torch.equal(model(IDS).logits, before)
    assert not any(module.training for module in model.modules())
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    scramble(model)
    assert not torch.equal(model(IDS).logits, before)


def test_only_the_adapter_is_trainable_and_it_is_what_travels(folder: Path) -> None:
    model = load_model(folder / "qwen3", "float32")
    digest = add_adapter(model, SMALL, seed=0)
    marker, *rest = adapter_weights(model, digest).items()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert [id(weight) for _, weight in rest] == list(map(id, trainable))
    assert marker[0] == f"base model xxh3-128 {digest}"
    assert marker[1].shape == (0,)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's own
@pytest.mark.parametrize("model_type", ["qwen3", "gpt2"])
def test_the_weights_have_the_names_and_shapes_that_peft_gives_them(
    folder: Path, model_type: str
) -> None:
    model = load_model(folder / model_type, "float32")
    weights = adapter_weights(model, add_adapter(model, SMALL, seed=0))
    config = peft.LoraConfig(
        r=4, target_modules="all-linear", fan_in_fan_out=model_type == "gpt2", task_type="CAUSAL_LM"
    )
    theirs = peft.get_peft_model(load_model(folder / model_type, "float32"), config)
    shapes = {name: w.shape for name, w in peft.get_peft_model_state_dict(theirs).items()}
    assert {name: w.shape for name, w in list(weights.items())[1:]} == shapes


def test_the_seed_decides_and_the_global_generator_stays(folder: Path) -> None:
    def first(seed: int) -> torch.Tensor:
        model = load_model(folder / "qwen3", "float32")
        torch.manual_seed(len(drawn))
        state = torch.get_rng_state()
        add_adapter(model, SMALL, seed)
        assert torch.equal(torch.get_rng_state(), state)
        return next(p for p in model.parameters() if p.requires_grad)

    drawn: list[torch.Tensor] = []
    for seed in (1, 1, 2):
        drawn.append(first(seed))  # noqa: PERF401 - the length so far is another global seed
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_targets_are_named_by_the_ends_of_their_names(folder: Path) -> None:
    def adapted(*targets: str) -> set[str]:
        model = load_model(folder / "qwen3", "float32")
        weights = adapter_weights(model, add_adapter(model, LoraConfig(target_modules=targets), 0))
        return {name.split(".lora_")[0].removeprefix("base_model.model.") for name in weights} - {
            next(iter(weights))
        }

    assert adapted("q_proj", "1.mlp.up_proj") == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }


@pytest.mark.parametrize("wanted", ["q_projection", "lm_head", "proj", "embed_tokens"])
def test_a_target_that_is_no_linear_module_is_named(folder: Path, wanted: str) -> None:
    model = load_model(folder / "qwen3", "float32")
    with pytest.raises(ConfigError, match=r"model\.lora\.target_modules") as caught:
        add_adapter(model, LoraConfig(target_modules=("q_proj", wanted)), 0)
    assert f": '{wanted}' is no linear module" in str(caught.value)
    assert "down_proj, gate_proj, k_proj, o_proj, q_proj" in str(caught.value)


def test_the_digest_is_of_every_bit_of_the_base(folder: Path) -> None:
    model = load_model(folder / "qwen3", "float32")
    digest = base_digest(model)
    assert add_adapter(load_model(folder / "qwen3", "float32"), SMALL, seed=3) == digest
    weight = model.model.layers[1].mlp.down_proj.weight
    with torch.no_grad():
        weight.view(torch.int32)[0, 0] ^= 1
    assert base_digest(model) != digest
    assert base_digest(load_model(folder / "qwen3", "bfloat16")) != digest


def test_without_peft_the_error_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"install ratchet-rl\[lora\]"):
        add_adapter(load_model(folder / "qwen3", "float32"), SMALL, seed=0)
