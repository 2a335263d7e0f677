"""Of a world: whether its trainer comes back from checkpoints, and when it dies; and whether what
finished is kept on the disk.

Drawn apart from the rest of a world, and not for the first seeds: mutants are pinned to those, and
the pins of worlds that change have to be looked for again.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from tests.simulation import faults as f

_FIRST = 1000
"""The first seed of worlds with these."""


class TrainerDraws(NamedTuple):
    """A world with checkpoints, or one without."""

    save_s: float | None = None
    """seconds that a checkpoint takes; None if there are none"""
    sections: dict[str, dict[str, Any]] = {}
    """fields of [checkpoint] and [runtime]"""
    faults: tuple[f.Fault, ...] = ()


def draw_trainers(seed: int, horizon: float, step_s: float) -> TrainerDraws:
    """Draw; one world in four has checkpoints, and a launcher of its trainer's own."""
    rng = random.Random(f"trainers/{seed}")
    if seed < _FIRST or rng.random() >= 0.25:
        return TrainerDraws()
    faults = []
    for _ in range(rng.choice([0, 1, 1, 2, 3, 6])):
        at = round(rng.uniform(0.0, horizon), 3)
        faults.append(f.KillTrainer(at, power=rng.random() < 0.3))
    sections = {
        "checkpoint": {"every_steps": rng.choice([1, 1, 2, 3, 5]), "keep": rng.choice([1, 2])}
    }
    if rng.random() < 0.8:
        sections["runtime"] = {"max_restarts": 1000}
    return TrainerDraws(rng.choice([0.01, 0.5, 3.0]) * step_s, sections, tuple(faults))


def draw_payloads(seed: int) -> float | None:
    """Return the seconds that each payload takes to be written; None to keep none."""
    rng = random.Random(f"payloads/{seed}")
    keeps = seed >= _FIRST and rng.random() < 0.3
    return rng.choice([0.001, 0.5, 20.0]) if keeps else None
