"""The replay behind `benchmarks/policies.py`: it runs, and each rule keeps what it promises."""

from __future__ import annotations

import pytest
from benchmarks.policies import POLICIES
from benchmarks.policies_replay import WARM_UP, Setting, replay
from benchmarks.policies_trace import Trace

SETTING = Setting(bound=2, submission="sample", ratio=1.0, num_steps=WARM_UP + 15)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return Trace(sigma=1.0, num_groups=3000)


@pytest.mark.parametrize(
    "name",
    [
        "drop, 2 B",
        *(pytest.param(n, marks=pytest.mark.soak) for n in ("mask, 2 B", "windowed FIFO")),
        "bounded, 2 B",
        pytest.param("bounded, (m+1) B", marks=pytest.mark.soak),
    ],
)
def test_a_hard_bound_holds_and_only_waiting_wastes_nothing(name: str, trace: Trace) -> None:
    (policy,) = (each for each in POLICIES if each.name == name)
    row = replay(policy, trace, SETTING)
    assert max(row.group_staleness[2], row.token_staleness[2]) <= SETTING.bound
    assert (row.wasted > 0.1) == name.startswith(("drop", "mask"))


def test_counting_what_was_begun_bounds_no_straggler(trace: Trace) -> None:
    (policy,) = (each for each in POLICIES if each.name == "AReaL")
    row = replay(policy, trace, SETTING)
    assert row.group_staleness[2] > SETTING.bound
    assert row.wasted == 0
