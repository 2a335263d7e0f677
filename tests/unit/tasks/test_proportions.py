from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.tasks.proportions import Turns, interleave

WEIGHTS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6)


def test_turns_come_in_proportion_at_every_moment() -> None:
    weights = (5.0, 3.0, 2.0)
    turns = Turns(weights)
    taken: Counter[int] = Counter()
    for num_taken in range(1, 1001):
        taken[turns.next()] += 1
        for task, weight in enumerate(weights):
            assert abs(taken[task] - num_taken * weight / 10) <= 1
    assert turns.counts == (500, 300, 200)


def test_equal_weights_take_strict_turns() -> None:
    turns = Turns((1.0, 1.0, 1.0))
    assert [turns.next() for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.integers(0, 300))
def test_a_later_place_is_found_without_the_turns_before_it(
    weights: list[float], num_taken: int
) -> None:
    turns = Turns(weights)
    for _ in range(num_taken):
        turns.next()
    found = Turns(weights, num_taken)
    assert found.counts == turns.counts
    assert [found.next() for _ in range(20)] == [turns.next() for _ in range(20)]


def test_a_far_place_is_found_at_once() -> None:
    counts = Turns((0.7, 0.2, 0.1), 10**12).counts
    assert counts == (7 * 10**11, 2 * 10**11, 10**11)


@pytest.mark.parametrize(
    ("weights", "order"), [((1.0, 1.0), "aAbBcd"), ((3.0, 1.0), "abAcdB"), ((1.0, 9.0), "ABabcd")]
)
def test_parts_are_interleaved_until_they_run_out(weights: tuple[float, float], order: str) -> None:
    assert "".join(interleave(["abcd", "AB"], weights)) == order
