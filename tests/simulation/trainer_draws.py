"""Of a world: whether its trainer comes back from checkpoints, and when it dies; and whether what
finished is kept on the disk.

Drawn apart from the rest of a world, and not for the first seeds: mutants are pinned to those, and
the pins of worlds that change have to be looked for again.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from tests.simulation import faults as f
from tests.simulation.standby import STANDBY
from tests.simulation.trainer_faults import KillTrainer, LoseNode

from ratchet.actors.role import TRAINER

_FIRST = 1000
"""The first seed of worlds with these."""


class TrainerDraws(NamedTuple):
    """A world with checkpoints, or one without."""

    save_s: float | None = None
    """seconds that a checkpoint takes; None if there are none"""
    sections: dict[str, dict[str, Any]] = {}
    """fields of [checkpoint] and [runtime]"""
    has_standby: bool = False
    faults: tuple[f.Fault, ...] = ()


def draw_trainers(seed: int, horizon: float, step_s: float, dead_s: float) -> TrainerDraws:
    """Draw; one world in four has checkpoints, and a launcher of its trainer's own."""
    rng = random.Random(f"trainers/{seed}")
    if seed < _FIRST or rng.random() >= 0.25:
        return TrainerDraws()
    faults: list[f.Fault] = []
    for _ in range(rng.choice([0, 1, 1, 2, 3, 6])):
        at = round(rng.uniform(0.0, horizon), 3)
        faults.append(KillTrainer(at, power=rng.random() < 0.3))
    sections = {
        "checkpoint": {"every_steps": rng.choice([1, 1, 2, 3, 5]), "keep": rng.choice([1, 2])}
    }
    if rng.random() < 0.8:
        sections["runtime"] = {"max_restarts": 1000}
    save_s = rng.choice([0.01, 0.5, 3.0]) * step_s
    has_standby = rng.random() < 0.4
    if has_standby:
        faults += _with_a_standby(rng, horizon, dead_s)
    return TrainerDraws(save_s, sections, has_standby, tuple(faults))


def _with_a_standby(rng: random.Random, horizon: float, dead_s: float) -> list[f.Fault]:
    """What a run survives that has a standby, and what may keep that from knowing."""
    faults: list[f.Fault] = []
    for _ in range(rng.choice([0, 1, 1, 2])):
        at = round(rng.uniform(0.0, horizon), 3)
        short_s = dead_s * rng.choice([0.02, 0.2, 0.45])
        makers: list[f.Fault] = [
            LoseNode(at),
            LoseNode(at),
            f.Freeze(at, TRAINER, dead_s * rng.choice([1.5, 8.0])),
            f.Freeze(at, STANDBY, short_s),
            f.Silence(at, STANDBY, short_s, rng.choice(["in", "out", "both"])),
            f.Cut(at, STANDBY),
        ]
        faults.append(rng.choice(makers))
    return faults


def draw_payloads(seed: int) -> float | None:
    """Return the seconds that each payload takes to be written; None to keep none."""
    rng = random.Random(f"payloads/{seed}")
    keeps = seed >= _FIRST and rng.random() < 0.3
    return rng.choice([0.001, 0.5, 20.0]) if keeps else None
