"""Tensors that are written come back, in the shape of whoever reads; what the disk says is told.

Sharded tensors: tests/contract/test_training_backend_saved.py, on two ranks.
"""

from __future__ import annotations

from errno import ENOENT
from pathlib import Path

import pytest
import torch

from ratchet.backends.training.saved_state import (
    copy_parts,
    read_parts,
    saved_names,
    write_parts,
)
from ratchet.backends.training.sharding import Ranks

ALONE = Ranks(0, 1)


def test_tensors_of_every_kind_come_back(tmp_path: Path) -> None:
    tensors = {
        "matrix": torch.randn(3, 5),
        "view": torch.randn(4, 6)[:, ::2],
        "half": torch.randn(7).bfloat16(),
        "bytes": torch.arange(9, dtype=torch.uint8),
        "empty": torch.zeros(0),
    }
    write_parts(copy_parts(tensors, {}, ALONE), tmp_path, ALONE)
    assert saved_names(tmp_path) == tensors.keys() - {"empty"}
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    read_parts(read, tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor), name


def test_what_is_written_is_what_was_copied(tmp_path: Path) -> None:
    tensor = torch.ones(3)
    parts = copy_parts({"t": tensor}, {}, ALONE)
    tensor.zero_()
    write_parts(parts, tmp_path, ALONE)
    read_parts({"t": tensor}, tmp_path)
    assert tensor.tolist() == [1.0, 1.0, 1.0]


def test_only_rank_0_writes_what_all_have_and_each_writes_its_own(tmp_path: Path) -> None:
    for rank in range(2):
        ranks = Ranks(rank, 2)
        own = {f"own.{rank}": torch.full((2,), rank)}
        write_parts(copy_parts({"all": torch.ones(3)}, own, ranks), tmp_path, ranks)
    assert saved_names(tmp_path) == {"all", "own.0", "own.1"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "state-00000-of-00002.safetensors",
        "state-00001-of-00002.safetensors",
    ]
    found = torch.zeros(2, dtype=torch.int64)
    read_parts({"own.1": found}, tmp_path)
    assert found.tolist() == [1, 1]


def test_a_tensor_that_was_not_saved_is_named(tmp_path: Path) -> None:
    write_parts(copy_parts({"t": torch.ones(1)}, {}, ALONE), tmp_path, ALONE)
    with pytest.raises(RuntimeError, match=r"model\.other"):
        read_parts({"model.other": torch.ones(1)}, tmp_path)


def test_a_disk_that_refuses_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file") as caught:
        write_parts(copy_parts({"t": torch.ones(1)}, {}, ALONE), tmp_path / "none", ALONE)
    assert caught.value.errno == ENOENT
