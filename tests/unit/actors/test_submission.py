"""When a worker takes its next group: once one has ended, or once so many samples have."""

from __future__ import annotations

import pytest
from tests.helpers.served_worker import Work, serve

WORK = Work(num_groups=40, group_size=4, slots=3, capacity=9)


@pytest.mark.parametrize("sigma", [0.5, 1.5])
def test_long_samples_leave_an_engine_less_idle_by_sample(sigma: float) -> None:
    group, sample = (serve(by, WORK._replace(sigma=sigma)) for by in ("group", "sample"))
    assert sample.took_s < group.took_s  # for the very same samples
    assert sample.idle_share < group.idle_share
    assert group.most_groups == WORK.slots < sample.most_groups <= WORK.capacity
    assert group.early_claims == 0 < sample.early_claims
    assert group.most_samples == sample.most_samples == WORK.slots * WORK.group_size


def test_by_sample_the_more_room_the_less_idle() -> None:
    idle = [serve("sample", WORK._replace(capacity=room)).idle_share for room in (4, 6, 12)]
    assert idle == sorted(idle, reverse=True)
    assert idle[0] > idle[-1]


def test_by_sample_no_more_groups_are_in_flight_than_slots() -> None:
    served = serve("sample", WORK._replace(capacity=1000, sigma=3.0, num_groups=120))
    assert WORK.slots < served.most_groups <= WORK.slots * WORK.group_size


def test_equal_lengths_are_served_alike() -> None:
    group, sample = (serve(by, WORK._replace(sigma=0.0)) for by in ("group", "sample"))
    assert sample.took_s == pytest.approx(group.took_s)
