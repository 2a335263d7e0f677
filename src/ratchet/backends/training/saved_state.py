"""The state of training in files: what a rank has of each tensor, in a safetensors file of its own.

Consumes named tensors, sharded ones included; produces `state-RANK-of-RANKS.safetensors`, or fills
such tensors again. Waits for the disk, and for no other rank.

The files have the layout of torch.distributed.checkpoint's HuggingFaceStorageReader, which reads
them back into any number of ranks. They are written here, because its writer exchanges its plans
between the ranks in pickles; a rank needs no plan to write what it has. What is not sharded is the
same everywhere, and rank 0 writes it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor

from ratchet.backends.training.sharding import Ranks

_OS_ERROR: Final = re.compile(r"os error (\d+)")


class Part(NamedTuple):
    """What this rank has of one tensor."""

    offsets: tuple[int, ...]
    """where it lies in the whole"""
    values: Tensor
    """on the CPU, of its own memory"""


def copy_parts(
    shared: Mapping[str, Tensor], own: Mapping[str, Tensor], ranks: Ranks
) -> dict[str, Part]:
    """Copy what this rank writes; afterwards the tensors may change.

    Args:
        shared: the same names on every rank.
        own: names that no other rank has.
        ranks: this one among all.
    """
    parts = {}
    for name, tensor in {**shared, **own}.items():
        local, offsets = _local(tensor.detach())
        mine = isinstance(tensor, DTensor) or ranks.rank == 0 or name in own
        if mine and local.numel():
            parts[name] = Part(offsets, local.to("cpu", copy=True).contiguous())
    return parts


def write_parts(parts: Mapping[str, Part], directory: Path, ranks: Ranks) -> None:
    """Write the file of this rank.

    Raises:
        OSError: if it cannot be written.
    """
    path = directory / f"state-{ranks.rank:05d}-of-{ranks.size:05d}.safetensors"
    where = {name: {"saved_offsets": part.offsets} for name, part in parts.items()}
    metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(where), "DCP_VERSION": "1.0"}
    try:
        save_file({name: part.values for name, part in parts.items()}, path, metadata)
    except SafetensorError as error:  # its only word on what the disk said is in the text
        number = _OS_ERROR.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None


def saved_names(directory: Path) -> frozenset[str]:
    """Return the names of the tensors in a directory's files."""
    metadata = HuggingFaceStorageReader(str(directory)).read_metadata()
    return frozenset(metadata.state_dict_metadata)


def read_parts(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Fill the tensors, or what this rank has of them, in place."""
    reader, planner = HuggingFaceStorageReader(str(directory)), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    with torch.no_grad():  # what torch's `load` does, which speaks to the other ranks in between
        filled = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
        planner.set_up_planner(filled, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        reader.read_data(plan, planner).wait()


def _local(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return tensor.to_local(), tuple(chunk.offsets)
