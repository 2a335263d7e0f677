"""Ranks: who takes part in training, and how the model is cut up among them.

Consumes torch.distributed, if the process has initialised it; produces a sharded model and sums
over ranks. Waits for the other ranks in every collective: each rank makes the same calls in the
same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Ranks(NamedTuple):
    """This process among those that train one model."""

    rank: int
    size: int


def current_ranks() -> Ranks:
    """Return the place in the default process group; alone where there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks(0, 1)
    return Ranks(dist.get_rank(), dist.get_world_size())


def shard(model: PreTrainedModel, ranks: Ranks, device: torch.device) -> None:
    """Shard layer by layer with FSDP2 (`fully_shard`), in place; alone, leave the model whole."""
    if ranks.size == 1:
        return
    mesh = init_device_mesh(device.type, (ranks.size,), mesh_dim_names=("data",))
    layers = frozenset(model._no_split_modules or ())
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)  # sums of gradients, whatever theirs
    for module in list(model.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def drop_gathered(model: PreTrainedModel) -> None:
    """Give back what a forward pass without a backward one leaves gathered: the next pass would use
    it again, whatever steps were taken meanwhile.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """Return the full values, detached; a collective where the tensor is sharded, else no copy."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def sum_over_ranks(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Return the sum of every rank's tensor."""
    if ranks.size > 1:
        dist.all_reduce(tensor, dist.ReduceOp.SUM)
    return tensor


def max_over_ranks(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Return the largest values of every rank's tensor."""
    if ranks.size > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor
