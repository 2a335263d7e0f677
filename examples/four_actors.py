"""The four actors of a run, started by hand in one process.

This is what `ratchet run --in-process` does, without the checks, the files and the supervision: one
`System`, four `start` calls, and what each actor is given. They find each other by name. Nothing
else is needed, and nothing here is private.

    python examples/four_actors.py [STEPS]
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ratchet
from ratchet.actors.buffer import BufferActor
from ratchet.actors.rollout import RolloutActor
from ratchet.actors.system import System
from ratchet.actors.trainer import TrainerActor
from ratchet.actors.version_registry import VersionRegistry
from ratchet.backends.rollout.torch import create_engine
from ratchet.backends.training.base import TrainingBackend
from ratchet.backends.training.fsdp import create_backend
from ratchet.observability.logs import configure_logging
from ratchet.runtime.base_model import ensure_base_model
from ratchet.runtime.role import EndOfActor
from ratchet.runtime.scoring import ThreadScorer
from ratchet.storage.ledger import GroupLedger
from ratchet.storage.versions import VersionStore
from ratchet.tasks.registry import build_task
from ratchet.transport.weights.registry import open_receiver, open_sender
from ratchet.types import RoleInfo

CONFIG = Path(__file__).with_name("tiny_copy.toml")


class Curve:
    """Where the trainer writes: here, to the terminal."""

    def begin(self, step: int) -> None:
        """Nothing was drawn before."""

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Draw the reward of every tenth step."""
        if metrics["step"] % 10 == 0:
            reward = metrics["reward_mean"]
            print(f"step {metrics['step']:3d} {'#' * round(60 * reward)} {reward:.2f}")

    def evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """Do without evaluations."""

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Say how it ended."""
        print(f"{summary['status']} after {summary['steps']} steps")

    async def model(self, backend: TrainingBackend) -> None:
        """Do without the model."""


async def run_actors(config: ratchet.Config, directory: Path) -> str:
    """Train to the end; return why the trainer ended."""
    log = configure_logging(directory / "log.jsonl", role="all", run="by-hand")
    rng = random.Random(config.seed)  # noqa: S311
    system = System(rng=rng, wall_time=time.time, new_id=lambda: uuid.uuid4().hex, log=log)
    task = build_task(config.task, config.seed)
    base = ensure_base_model(config, directory / "base")
    backend = create_backend(config, base)

    registry = VersionRegistry.start(system, "registry", store=VersionStore.open(None))
    role = RoleInfo("buffer", "buffer", incarnation="life-1")
    prompts, ledger = task.prompts("train"), GroupLedger.open(None)
    buffer = BufferActor.start(system, role, config=config, prompts=prompts, ledger=ledger)

    role = RoleInfo("rollout", "rollout-0", incarnation="life-1")
    engine, scorer = create_engine(config, base), ThreadScorer(task)
    ends = {"receiver": open_receiver(config.weights), "scorer": scorer, "eval_prompts": ()}
    rollout = RolloutActor.start(system, role, config=config, engine=engine, **ends)

    role = RoleInfo("trainer", "trainer-0", incarnation="life-1")
    sender = open_sender(config.weights, "127.0.0.1", backend)
    ends = {"sender": sender, "output": Curve(), "warm_start_prompts": ()}
    trainer = TrainerActor.start(system, role, config=config, backend=backend, **ends)

    end = EndOfActor(trainer.name)
    trainer.watch(end)
    reason = await end.reason
    for ref in (rollout, buffer, registry):
        await ref.stop(block=False)
    return reason


def main() -> None:
    """Train, and draw the curve."""
    changes = [f"trainer.num_steps={sys.argv[1]}"] if len(sys.argv) > 1 else []
    with tempfile.TemporaryDirectory() as directory:
        config = ratchet.load_config(CONFIG, changes)
        print("trainer:", asyncio.run(run_actors(config, Path(directory))))


if __name__ == "__main__":
    main()
