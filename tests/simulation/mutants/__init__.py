"""Faults of others, put back into our actors one at a time: some world must catch each.

A mutant is a small patch of one method and the line of the list of faults that it stands for. What
catches it is a random world, whose `seed` was found by trying worlds from 0 on, or, where none of
those comes to its moment, a handmade `world`. Where the line is about a part that the simulation
replaces by a fake (an engine, a receiver), the fake is patched, which proves that the invariant can
fail, not that the real part is right: those are marked `fake`.
"""

from tests.simulation.mutants import (  # noqa: F401 - each registers its own
    admission,
    checkpoints,
    counters,
    disk,
    generation,
    groups,
    masks,
    session,
    supervisor,
    versions,
    weights,
)
from tests.simulation.mutants.base import MUTANTS, Mutant, planted

__all__ = ["MUTANTS", "Mutant", "planted"]
