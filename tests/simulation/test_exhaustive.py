"""All interleavings at small size; `python -m tests.simulation.exhaustive` runs the larger ones."""

from __future__ import annotations

import pytest
from tests.simulation.exhaustive import SCENARIOS, Search
from tests.simulation.mutants import planted

BASE_S = 4.0
"""CPU seconds for a part of the scenario with a crash, which takes minutes."""


def test_one_publish_one_finish_one_claim_one_batch_in_every_order() -> None:
    report = Search("small").run()
    assert not report.problems, report.problems
    assert report.num_left == 0
    assert report.num_states > 300
    assert report.num_ends > 1


def test_the_first_of_those_with_a_crash() -> None:
    report = Search("base").run(within_s=BASE_S)
    assert not report.problems, report.problems
    assert report.num_ends > 0


@pytest.mark.soak  # each of the 472 orders is a path of its own
def test_to_merge_states_loses_no_outcome() -> None:
    merged, whole = Search("tiny").run(), Search("tiny", merge=False).run()
    assert merged.finals == whole.finals
    assert len(whole.finals) > 1
    assert merged.num_states < whole.num_states / 5
    assert not merged.problems
    assert not whole.problems


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a world that breaks leaves work undone
@pytest.mark.parametrize(
    ("mutant", "scenario", "invariant"),
    [
        ("reserved_after_the_request", "small", "I7"),
        ("prompts_before_weights", "base", "I4"),
        ("nobody_catches_up", "base", "I7"),
    ],
)
def test_a_fault_put_back_is_found(mutant: str, scenario: str, invariant: str) -> None:
    assert scenario in SCENARIOS
    with planted(mutant):
        report = Search(scenario).run(within_s=20, until_found=True)
    assert any(problem.startswith(invariant) for problem in report.problems), report
