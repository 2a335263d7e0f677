"""Each fault put back is caught by its world, which is fine without it."""

from __future__ import annotations

import pytest
from tests.simulation.draw import draw
from tests.simulation.mutants import MUTANTS, planted
from tests.simulation.simulate import run

CAUGHT = {name: mutant.seed for name, mutant in MUTANTS.items() if mutant.seed is not None}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a world that breaks leaves work undone
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.soak] if MUTANTS[n].slow else []) for n in CAUGHT],
)
def test_it_is_caught(name: str) -> None:
    with planted(name):
        outcome = run(draw(CAUGHT[name]))
    assert outcome.problems, f"{name} survives: {MUTANTS[name].line}"


@pytest.mark.soak
@pytest.mark.parametrize("seed", sorted(set(CAUGHT.values())))
def test_the_world_is_fine_without_it(seed: int) -> None:
    assert not run(draw(seed)).problems
