"""The weights of an engine's model, by name: what a load writes and a verification reads.

Consumes a model directory and tensors, produces tensors; runs on the engine's thread and waits for
nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ratchet.backends.lora import adapter_weights, add_adapter
from ratchet.backends.models import load_model
from ratchet.backends.named_weights import named_weights, weight_specs
from ratchet.errors import WeightsMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from ratchet.config import LoraConfig


class EngineWeights:
    """The weights that travel: of a whole model, or of its adapter."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.specs = weight_specs(weights)
        self._weights = weights

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy values into the model.

        Raises:
            WeightsMismatch: if a name, shape or dtype is not the model's; the text names it.
        """
        for name, value in tensors.items():
            with torch.no_grad():
                self._fitting(name, value).copy_(value)

    def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put tensors in the place of the model's own, tied ones too, as these are one tensor.

        Raises:
            WeightsMismatch: as for `write`.
        """
        for name, value in tensors.items():
            self._fitting(name, value).data = value

    def read(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return the model's own tensors.

        Raises:
            WeightsMismatch: if the model has no such tensor.
        """
        return [self._named(name).detach() for name in names]

    def _fitting(self, name: str, value: torch.Tensor) -> torch.Tensor:
        weight = self._named(name)
        if weight.shape != value.shape or weight.dtype != value.dtype:
            msg = (
                f"{name} is {weight.dtype} {tuple(weight.shape)} in the engine, but"
                f" {value.dtype} {tuple(value.shape)} came"
            )
            raise WeightsMismatch(msg)
        return weight

    def _named(self, name: str) -> torch.Tensor:
        weight = self._weights.get(name)
        if weight is None:
            msg = f"the engine's model has no weight named {name!r}"
            raise WeightsMismatch(msg)
        return weight


def open_model(
    path: Path, dtype: str, lora: LoraConfig | None, device: str
) -> tuple[PreTrainedModel, EngineWeights]:
    """Load a model onto a device; with an adapter, that alone is what travels.

    Raises:
        ConfigError: if the directory cannot be used.
    """
    model = load_model(path, dtype)
    if lora is None:
        model = model.to(device)
        return model, EngineWeights(named_weights(model))
    digest = add_adapter(model, lora, seed=0)  # every load replaces the adapter
    model = model.to(device)
    return model, EngineWeights(adapter_weights(model, digest))
