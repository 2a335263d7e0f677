"""A slice of random worlds: some fresh ones, printed, and those that once broke."""

from __future__ import annotations

import secrets
import time

import pytest
from tests.simulation.draw import draw
from tests.simulation.simulate import explain, run

FRESH_S = 6.0
"""CPU seconds for fresh worlds; `python -m tests.simulation --worlds N` runs more."""

ONCE_BROKEN = {
    18: "a take-over began a tree of its own, and the buffer died",
    56: "an old trainer that was handed tokens of the new one ended with '1'",
    40037: "a request asked for one of two burnt ancestors, and nobody for the other",
    1016: "a take-over left the synchronous buffer without room",
}


@pytest.mark.parametrize("seed", ONCE_BROKEN)
def test_a_world_that_once_broke(seed: int) -> None:
    outcome = run(draw(seed))
    assert not outcome.problems, explain(outcome)


def test_fresh_worlds() -> None:
    first = secrets.randbelow(10**9)
    until = time.process_time() + FRESH_S
    seed = first
    while time.process_time() < until:
        outcome = run(draw(seed))
        assert not outcome.problems, explain(outcome)
        seed += 1
    print(f"worlds {first} to {seed - 1}")  # noqa: T201 - shown with -s, and on a failure
    assert seed > first + 2


@pytest.mark.parametrize("seed", [3, 11, 23])
def test_a_world_is_the_same_each_time(seed: int) -> None:
    assert run(draw(seed)).trace == run(draw(seed)).trace
    assert repr(draw(seed)) == repr(draw(seed))
