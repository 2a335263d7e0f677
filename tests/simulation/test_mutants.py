"""Each fault put back is caught by some world, which is fine without it."""

from __future__ import annotations

import time

import pytest
from tests.simulation.draw import draw
from tests.simulation.mutants import MUTANTS, planted
from tests.simulation.simulate import run

PINNED = sorted({mutant.seed for mutant in MUTANTS.values() if mutant.seed is not None})
HANDMADE = {name: mutant.world for name, mutant in MUTANTS.items() if mutant.world is not None}
SEARCH_S = 15.0
"""CPU seconds to find another world in, where a change of the product has moved the pinned one."""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a world that breaks leaves work undone
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.soak] if MUTANTS[n].slow else []) for n in MUTANTS],
)
def test_it_is_caught(name: str) -> None:
    until = time.process_time() + SEARCH_S
    for plan in MUTANTS[name].worlds():
        with planted(name):
            outcome = run(plan)
        if outcome.problems:
            return
        assert time.process_time() < until, f"{name} survives: {MUTANTS[name].line}"


@pytest.mark.parametrize("name", HANDMADE)
def test_the_handmade_world_is_fine_without_it(name: str) -> None:
    assert not run(HANDMADE[name]).problems


@pytest.mark.soak
@pytest.mark.parametrize("seed", PINNED)
def test_the_world_is_fine_without_it(seed: int) -> None:
    assert not run(draw(seed)).problems
