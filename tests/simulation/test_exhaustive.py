"""All interleavings at small size; `python -m tests.simulation.exhaustive` runs the larger ones."""

from __future__ import annotations

import random
from contextlib import closing

import pytest
from tests.simulation.exhaustive import Report, Search, explore_each_path, walk
from tests.simulation.mutants import planted

PART_S = 1.5
"""CPU seconds for a part of what takes longer"""


def explored(name: str, **limits: float) -> Report:
    with closing(Search(name)) as search:
        return search.run(**limits)


def test_one_publish_one_finish_one_claim_one_batch_in_every_order() -> None:
    report = explored("small")
    assert not report.problems, report.problems
    assert report.num_left == 0
    assert report.num_states > 300
    assert report.num_ends > 1


def test_the_same_with_a_crash_of_the_worker_at_any_point() -> None:
    report = explored("crash")
    assert not report.problems, report.problems
    assert report.num_left == 0
    assert report.num_states > 10_000
    assert report.num_ends > 50


@pytest.mark.parametrize("name", ["worker", "trainer"])
def test_the_first_of_those_with_a_crash_and_a_restart(name: str) -> None:
    report = explored(name, within_s=PART_S)
    assert not report.problems, report.problems
    assert report.num_ends > 0


@pytest.mark.soak  # each of the hundreds of orders is a path of its own
@pytest.mark.parametrize("name", ["tiny", "tiny crash"])
def test_to_merge_states_loses_no_outcome(name: str) -> None:
    merged, whole = explored(name), explore_each_path(name)
    assert merged.outcomes == whole.outcomes
    assert merged.num_states < whole.num_states
    assert not merged.problems
    assert not whole.problems


def test_wherever_a_walk_ends_the_search_was_there() -> None:
    ends = explored("small").outcomes
    for seed in range(20):
        walked = walk("small", random.Random(seed))
        assert walked.outcomes <= ends, seed
        assert not walked.problems, seed


@pytest.mark.soak  # the searches are whole
@pytest.mark.parametrize("name", ["crash", "worker", "trainer"])
def test_wherever_a_walk_with_a_crash_ends_the_search_was_there(name: str) -> None:
    report = explored(name)
    assert not report.problems, report.problems
    for seed in range(300):
        walked = walk(name, random.Random(seed))
        assert walked.outcomes <= report.outcomes, seed
        assert not walked.problems, seed


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a world that breaks leaves work undone
@pytest.mark.parametrize(
    ("mutant", "scenario", "invariant"),
    [
        ("reserved_after_the_request", "small", "I7"),
        ("prompts_before_weights", "worker", "I4"),
        ("nobody_catches_up", "worker", "I7"),
    ],
)
def test_a_fault_put_back_is_found(mutant: str, scenario: str, invariant: str) -> None:
    with planted(mutant):
        report = explored(scenario, within_s=20, until_found=True)
    assert any(problem.startswith(invariant) for problem in report.problems), report
