"""A slice of random worlds, some of them fresh each time. More: `make simulate`."""

from __future__ import annotations

import secrets

import pytest
from tests.simulation.draw import draw
from tests.simulation.simulate import explain, run

FRESH = 6


@pytest.mark.parametrize("seed", range(7000, 7006))
def test_a_world(seed: int) -> None:
    outcome = run(draw(seed))
    assert not outcome.problems, explain(outcome)


def test_fresh_worlds(capsys: pytest.CaptureFixture[str]) -> None:
    first = secrets.randbelow(10**9)
    with capsys.disabled():
        print(f"\nfresh worlds: seeds {first} to {first + FRESH - 1}")  # noqa: T201 - to replay
    for seed in range(first, first + FRESH):
        outcome = run(draw(seed))
        assert not outcome.problems, explain(outcome)


@pytest.mark.parametrize("seed", [3, 11, 23, 3041])
def test_a_world_is_the_same_each_time(seed: int) -> None:
    assert run(draw(seed)).trace == run(draw(seed)).trace
    assert repr(draw(seed)) == repr(draw(seed))
