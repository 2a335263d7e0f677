"""A slice of random worlds. Fresh ones: `make simulate`, or `python -m tests.simulation`."""

from __future__ import annotations

import pytest
from tests.simulation.draw import draw
from tests.simulation.simulate import explain, run

SLICE = range(7000, 7012)


@pytest.mark.parametrize("seed", SLICE)
def test_a_world(seed: int) -> None:
    outcome = run(draw(seed))
    assert not outcome.problems, explain(outcome)


@pytest.mark.parametrize("seed", [3, 11, 23])
def test_a_world_is_the_same_each_time(seed: int) -> None:
    assert run(draw(seed)).trace == run(draw(seed)).trace
    assert repr(draw(seed)) == repr(draw(seed))
