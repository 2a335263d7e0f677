from __future__ import annotations

import torch

from ratchet.backends.named_weights import named_weights, weight_specs


def test_weights_are_parameters_and_persistent_buffers_under_every_name() -> None:
    module = torch.nn.Module()
    module.one = torch.nn.Linear(2, 3, bias=False)
    module.two = torch.nn.Linear(2, 3, bias=False)
    module.two.weight = module.one.weight
    module.norm = torch.nn.BatchNorm1d(3)
    module.norm.register_buffer("cache", torch.zeros(9), persistent=False)
    weights = named_weights(module)
    assert weights["two.weight"] is module.one.weight
    assert weights["norm.running_mean"] is module.norm.running_mean
    assert weight_specs(named_weights(module)) == (
        ("one.weight", "float32", (3, 2), None),
        ("two.weight", "float32", (3, 2), "one.weight"),
        ("norm.weight", "float32", (3,), None),
        ("norm.bias", "float32", (3,), None),
        ("norm.running_mean", "float32", (3,), None),
        ("norm.running_var", "float32", (3,), None),
        ("norm.num_batches_tracked", "int64", (), None),
    )
