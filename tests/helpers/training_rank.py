"""One rank of a training backend, as a process: trains a fixed job and exports the model.

    python -m tests.helpers.training_rank RANK WORLD_SIZE FOLDER

FOLDER/base holds the base model; the ranks meet through FOLDER/store-WORLD_SIZE. Rank 0 exports to
FOLDER/out-WORLD_SIZE; every rank writes its reports to FOLDER/reports-WORLD_SIZE-RANK.json.
"""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch.distributed as dist
from tests.helpers.training import copy_prompts, make_groups, training_config

from ratchet.backends.training.fsdp import FsdpBackend
from ratchet.types import Packed, RolloutGroup

CONFIG = training_config(
    warm_start={"steps": 2, "batch_size": 7, "lr": 1e-3, "lr_warmup_steps": 0},
    trainer={"micro_batch_tokens": 30, "weight_decay": 0.1, "max_grad_norm": 0.5},
    algorithm={"entropy_coef": 0.01},
)
"""Small micro-batches, so that the last one of a batch leaves a rank without rows; clipped."""


async def train(folder: Path, world_size: int) -> dict[str, Any]:
    """Train the fixed job as one rank, or alone; return everything that was reported."""
    backend = FsdpBackend(folder / "base", config=CONFIG, device="cpu")
    await backend.start()
    reports: list[dict[str, float]] = [dict(await backend.warm_start(copy_prompts(9)))]
    for seed in range(3):
        groups = make_groups(3, 3, seed=seed)
        report = await backend.forward_backward(groups)
        step = await backend.optimizer_step()
        assert report.finite
        assert step.applied
        reports.append({**report.metrics, **step.metrics})
    specs = [list(spec) for spec in backend.specs()]
    read = backend.read([spec.name for spec in backend.specs()])
    shapes = [list(tensor.shape) for tensor in read]
    await backend.export(folder / f"out-{world_size}")
    bad = await backend.forward_backward([_with_nan(make_groups(1, 2)[0])])
    bad_step = await backend.optimizer_step()
    await backend.close()
    return {
        "reports": reports,
        "specs": specs,
        "shapes": shapes,
        "bad": [bad.finite, bad_step.applied],
    }


def _with_nan(group: RolloutGroup) -> RolloutGroup:
    """Return the group with a NaN in one rollout: the rows of one rank only."""
    first, second = group.rollouts
    nans = Packed.of(np.full(len(first.completion_ids), np.nan), "float32")
    broken = msgspec.structs.replace(first, behavior_logprobs=nans)
    return msgspec.structs.replace(group, rollouts=(broken, second))


def train_as(rank: int, world_size: int, folder: Path) -> None:
    """Meet the other ranks, train the fixed job with them, and write the reports of this one."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store-{world_size}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    try:
        result = asyncio.run(train(folder, world_size))
        (folder / f"reports-{world_size}-{rank}.json").write_text(json.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def main() -> None:
    train_as(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))


if __name__ == "__main__":
    main()
