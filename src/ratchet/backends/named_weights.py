"""The weights of a model by name, and as what travels.

Pure: consumes a model, produces its own tensors and their `TensorSpec`s; waits for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratchet.transport.weights.base import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


def named_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and persistent buffer by name, tied ones under each of their names.
    They are the model's own tensors, not copies.
    """
    weights: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    persistent = model.state_dict().keys()
    return weights | {name: buffers[name] for name in buffers if name in persistent}


def weight_specs(weights: Mapping[str, torch.Tensor]) -> tuple[TensorSpec, ...]:
    """Describe what `named_weights` returns, in its order; of tied names the first one travels."""
    first: dict[int, str] = {}
    specs = []
    for name, weight in weights.items():
        owner = first.setdefault(id(weight), name)
        dtype = str(weight.dtype).removeprefix("torch.")
        alias_of = None if owner == name else owner
        specs.append(TensorSpec(name, dtype, tuple(weight.shape), alias_of))
    return tuple(specs)
