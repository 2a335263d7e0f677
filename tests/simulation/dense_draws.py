"""Of a world with many faults: more of those that cost little time to simulate.

Drawn apart from the rest of a world, and not for the first seeds, to which mutants are pinned. What
is drawn ends nothing: a connection, a transfer or a clock is disturbed, at any moment of a run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tests.simulation import faults as f

from ratchet.actors.role import BUFFER, REGISTRY, TRAINER

_FIRST = 1000
"""The first seed of worlds with these."""
_MANY = 60


def draw_dense(seed: int, names: Sequence[str], horizon: float, count: int) -> list[f.Fault]:
    """Draw as many as a world has otherwise, if those are many; `names` are of its workers."""
    if seed < _FIRST or count < _MANY:
        return []
    rng = random.Random(f"dense/{seed}")
    return [_fault(rng, names, horizon) for _ in range(count)]


def _fault(rng: random.Random, names: Sequence[str], horizon: float) -> f.Fault:
    at = round(rng.uniform(0.0, horizon), 3)
    name = rng.choice(names)
    role = rng.choice([name, REGISTRY, BUFFER, TRAINER])
    makers: list[Callable[[], f.Fault]] = [
        lambda: f.Cut(at, role),
        lambda: f.WallClock(at, role, rng.choice([-1e5, -1.0, 3600.0])),
        lambda: f.SlowTransfer(at, name, rng.choice([1.0, 15.0, 100.0])),
        lambda: f.CorruptTransfer(at, name),
        lambda: f.LoseTransfer(at, (name,)),
    ]
    return rng.choice(makers)()
