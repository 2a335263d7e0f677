"""LoRA adapters (arXiv:2106.09685), by PEFT: what trainer and engines share.

Consumes a base model and `[model.lora]`; produces the same model with an adapter inside, the
weights that travel, and the adapter's directory as PEFT reads it. Waits for the disk only. PEFT is
imported when an adapter is made, and never where there is none.

Both sides run the same adapted modules, base(x) + alpha / rank x B(A(x)), and nobody merges: in
less than float32 a merged weight is rounded once more, so that engine and trainer would disagree.
The adapter has the dtype of the model; the optimiser keeps float32 masters of it, as of any weight.

The base model does not travel, so its digest does: as the name of an empty tensor among the
weights. An engine with another base model is then refused like one that lacks a parameter, before
it is touched, and the error names both digests.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

import torch
import xxhash
from safetensors.torch import save_file

from ratchet.backends.models import building, load_model
from ratchet.backends.named_weights import named_weights, weight_specs
from ratchet.config import LoraConfig
from ratchet.errors import ConfigError
from ratchet.transport.weights.buckets import host_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from transformers import PreTrainedModel

_ADAPTER: Final = "default"
_PREFIX: Final = "base_model.model."
"""PEFT names the modules of an adapter as seen from its own wrapper around the model."""


def add_adapter(model: PreTrainedModel, lora: LoraConfig, seed: int) -> str:
    """Put a fresh adapter into a model, in place, and freeze everything else. B is zero, so the
    model computes what it did before.

    Args:
        model: the base model, whole.
        lora: rank, alpha and targets.
        seed: of A; the global generator of torch is left as it was.

    Returns:
        The digest of the base model.

    Raises:
        ConfigError: if PEFT is not installed, or `target_modules` names what is no linear module
            of the model.
    """
    peft = _import_peft()
    targets = _targets(model, lora)
    digest = base_digest(model)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=targets,
        fan_in_fan_out=any(_is_transposed(model.get_submodule(name)) for name in targets),
        task_type=peft.TaskType.CAUSAL_LM,
    )
    with building(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    model.eval()
    return digest


def base_digest(model: PreTrainedModel) -> str:
    """Return the xxh3-128 over names, dtypes, shapes and values of a model without an adapter."""
    weights = named_weights(model)
    hasher = xxhash.xxh3_128()
    for spec in weight_specs(weights):
        hasher.update(repr(tuple(spec)).encode())
        if spec.alias_of is None:
            hasher.update(host_bytes(weights[spec.name]))
    return hasher.hexdigest()


def adapter_weights(model: PreTrainedModel, digest: str) -> dict[str, torch.Tensor]:
    """Return what travels: the adapter's parameters under PEFT's names, and an empty tensor whose
    name is the digest of the base model. They are the model's own tensors, not copies.
    """
    marker = torch.zeros(0, dtype=torch.uint8, device=model.device)
    weights = {f"base model xxh3-128 {digest}": marker}
    for name, parameter in model.named_parameters():
        if f".{_ADAPTER}." in name:
            weights[_PREFIX + name.replace(f".{_ADAPTER}.", ".")] = parameter
    return weights


def save_adapter(
    model: PreTrainedModel, weights: Mapping[str, torch.Tensor], base: Path, path: Path
) -> None:
    """Write adapter_config.json and adapter_model.safetensors into a new directory.

    Args:
        model: with an adapter; only its configuration is read.
        weights: full values of what `adapter_weights` returns.
        base: directory of the base model, which the adapter refers to.
        path: the new directory.
    """
    path.mkdir(parents=True)
    config = copy.copy(model.peft_config[_ADAPTER])
    config.base_model_name_or_path = str(base.resolve())
    config.target_modules = sorted(config.target_modules)  # a set: else each run writes it anew
    config.inference_mode = True
    config.save_pretrained(path)
    values = {name: weight for name, weight in weights.items() if name.startswith(_PREFIX)}
    save_file(
        {name: value.detach().cpu().contiguous() for name, value in values.items()},
        path / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )


def merge_adapter(base: Path, dtype: str, adapter: Path) -> PreTrainedModel:
    """Load a base model, and add an adapter's products to its weights."""
    peft = _import_peft()
    model = load_model(base, dtype)
    with building():
        adapted = peft.PeftModel.from_pretrained(
            model, adapter, torch_device="cpu", autocast_adapter_dtype=False
        )
        merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
    return merged


def _targets(model: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """Return the full names of the modules that get an adapter, in the model's order."""
    output = model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if module is not output and (isinstance(module, torch.nn.Linear) or _is_transposed(module))
    ]
    if lora.target_modules == "all-linear":
        return linear
    matches = {
        wanted: [name for name in linear if f".{name}".endswith(f".{wanted}")]
        for wanted in lora.target_modules
    }
    unknown = [wanted for wanted, names in matches.items() if not names]
    if unknown:
        known = sorted({name.rpartition(".")[2] for name in linear})
        msg = (
            f"model.lora.target_modules: {', '.join(map(repr, unknown))} is no linear module of the"
            f" model (its output layer is left out); known: {', '.join(known)}"
        )
        raise ConfigError(msg)
    chosen = {name for names in matches.values() for name in names}
    return [name for name in linear if name in chosen]


def _is_transposed(module: torch.nn.Module) -> bool:
    """Whether this is the linear module of GPT-2, which keeps its weight as [in, out]."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        msg = (
            f"[model.lora] needs the package peft ({error}); install ratchet-rl[lora], or leave the"
            " section out"
        )
        raise ConfigError(msg) from error
    return peft
