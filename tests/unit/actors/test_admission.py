"""The caps, one by one; and a random run of bounded admission, in which nothing is ever too old."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.config import small_config
from tests.helpers.training import make_groups

from ratchet.actors.admission import Admission, OpenGroups, payload_bytes
from ratchet.errors import ConfigError
from ratchet.staleness import first_batch, must_go


def admission(*, synchronous: bool = False, **buffer: Any) -> Admission:
    config = small_config(buffer={"batch_groups": 2, **buffer})
    return Admission(config.buffer, synchronous=synchronous)


def test_capacity_counts_what_is_in_flight_and_what_has_finished() -> None:
    caps = admission(capacity_factor=2.5)
    assert caps.room(OpenGroups(0, 0, 0)) == 5
    assert caps.room(OpenGroups(2, 2, 0)) == 1
    assert caps.room(OpenGroups(5, 0, 0), staleness=100) == 0
    assert caps.room(OpenGroups(5, 2, 0)) == 0


def test_bytes_count_the_finished_and_what_may_come_in() -> None:
    caps = admission(capacity_factor=50.0, max_bytes=1000)
    assert caps.room(OpenGroups(0, 0, 0, 100)) == 10
    assert caps.room(OpenGroups(4, 5, 450, 100)) == 1  # 450 + 5 x 100 <= 1000
    assert caps.room(OpenGroups(4, 6, 501, 100)) == 0
    assert caps.room(OpenGroups(0, 9, 5000, 100)) == 0


def test_bytes_always_let_one_batch_in_and_no_more_before_a_size_is_known() -> None:
    caps = admission(capacity_factor=50.0, max_bytes=1000)
    assert caps.room(OpenGroups(0, 0, 0)) == 2
    assert caps.room(OpenGroups(1, 0, 0)) == 1
    assert caps.room(OpenGroups(0, 1, 10**6, 10**6)) == 1
    assert caps.room(OpenGroups(1, 1, 10**6, 10**6)) == 0


@settings(deadline=None)
@given(st.data())
def test_bytes_exceed_the_cap_by_no_more_than_what_the_docstring_says(data: st.DataObject) -> None:
    batch, limit = 2, 1000
    caps = admission(capacity_factor=50.0, max_bytes=limit)
    flying, queued, largest = 0, deque[int](), 0
    excess = 0  # what groups in flight have turned out larger than all before them, at most
    for _ in range(60):
        free = caps.room(OpenGroups(flying, len(queued), sum(queued), largest))
        if flying and (not free or data.draw(st.booleans())):
            size = data.draw(st.integers(1, 400))
            excess += max(0, size - largest) * flying
            largest = max(largest, size)
            queued.append(size)
            flying -= 1
        elif free:
            flying += 1
        elif len(queued) >= batch:
            for _ in range(batch):
                queued.popleft()
        assert len(queued) <= batch or sum(queued) <= limit + excess


def test_a_synchronous_trainer_has_one_batch_of_room_until_its_version_is_there() -> None:
    caps = admission(synchronous=True)
    assert caps.is_bounded
    assert caps.room(OpenGroups(0, 0, 0)) == 2
    assert caps.room(OpenGroups(0, 0, 0), staleness=1) == 0


@pytest.mark.parametrize(
    ("bound", "staleness", "room"),
    [(0, 0, 2), (0, 1, 0), (2, 0, 6), (2, 1, 4), (2, 2, 2), (2, 3, 0), (2, 9, 0)],
)
def test_bounded_room_shrinks_by_a_batch_with_each_step(
    bound: int, staleness: int, room: int
) -> None:
    caps = admission(admission="bounded", max_staleness=bound, capacity_factor=9.0)
    assert caps.room(OpenGroups(0, 0, 0), staleness) == room
    assert caps.room(OpenGroups(1, 1, 0), staleness) == max(0, room - 2)


@pytest.mark.parametrize(("staleness", "room"), [(0, 6), (1, 4), (2, 2), (4, 2), (5, 0)])
def test_bounded_keeps_the_place_of_what_is_trained_until_its_version_is_there(
    staleness: int, room: int
) -> None:
    caps = admission(admission="bounded", max_staleness=4, capacity_factor=3.0)
    assert caps.room(OpenGroups(0, 0, 0), staleness) == room  # one batch in any case


def test_the_payload_is_all_arrays() -> None:
    group = make_groups(1, 2)[0]
    arrays = [
        array
        for r in group.rollouts
        for array in (r.prompt_ids, r.completion_ids, r.behavior_logprobs, r.loss_mask)
    ]
    assert payload_bytes(group) == sum(len(array.data) for array in arrays) > 0


def test_a_cap_that_can_hold_no_batch_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"max_bytes = 77 .*2 x 3 x 13 = 78 bytes"):
        small_config(buffer={"batch_groups": 2, "max_bytes": 77}, rollout={"group_size": 3})
    small_config(buffer={"batch_groups": 2, "max_bytes": 78}, rollout={"group_size": 3})


class Run:
    """Workers that lag, fail and die; a trainer that skips steps: driven by the two rules alone."""

    def __init__(self, seed: int, batch: int, bound: int, num_workers: int) -> None:
        self.rng = random.Random(seed)
        self.batch, self.bound = batch, bound
        self.caps = admission(
            batch_groups=batch, max_staleness=bound, admission="bounded", capacity_factor=50.0
        )
        self.held = [0] * num_workers  # steps of the versions that the workers hold
        self.step = 0  # of the next batch; one that is out counts as trained
        self.is_out = False
        self.in_flight: list[tuple[int, int]] = []  # (worker, base)
        self.queued: list[int] = []  # oldest token
        self.num_trained = 0
        self.ages: list[int] = []

    def batch_of(self) -> list[int] | None:
        finished = [self.step - oldest for oldest in self.queued]
        ages = Counter([*finished, *(self.step - base for _, base in self.in_flight)])
        return first_batch(self.batch, must_go(self.batch, self.bound, ages), finished)

    def act(self) -> None:
        getattr(self, self.rng.choice(["issue"] * 6 + ["finish"] * 6 + ["lose", "load", "train"]))()

    def issue(self) -> None:
        worker = self.rng.randrange(len(self.held))
        base = self.held[worker]
        groups = OpenGroups(len(self.in_flight), len(self.queued), 0)
        if self.caps.room(groups, self.step - base):
            self.in_flight.append((worker, base))

    def finish(self) -> None:
        """A first token is as old as the issue, or of what was loaded since."""
        if self.in_flight:
            worker, base = self.in_flight.pop(self.rng.randrange(len(self.in_flight)))
            self.queued.append(self.rng.randint(base, self.held[worker]))

    def lose(self) -> None:
        """A failure, a filter, the end of a lease: each frees a slot."""
        if self.in_flight:
            self.in_flight.pop(self.rng.randrange(len(self.in_flight)))

    def load(self) -> None:
        worker = self.rng.randrange(len(self.held))
        if not self.is_out:  # the newest version is that of the step that was taken last
            self.held[worker] = self.step

    def train(self) -> None:
        if self.is_out:
            self.is_out = False
            if self.rng.random() < 0.2:
                self.step -= 1  # not finite: nothing was published
            else:
                self.num_trained += 1
        elif (batch := self.batch_of()) is not None:
            taken = [self.queued[index] for index in batch]
            self.queued = [each for i, each in enumerate(self.queued) if i not in batch]
            self.ages += [self.step - oldest for oldest in taken]
            self.step += 1
            self.is_out = True


@settings(max_examples=60, deadline=None)
@given(st.integers(), st.integers(1, 4), st.integers(0, 3), st.integers(1, 4))
def test_nothing_is_ever_too_old_in_bounded_mode(
    seed: int, batch: int, bound: int, num_workers: int
) -> None:
    run = Run(seed, batch, bound, num_workers)
    for _ in range(400):
        run.act()
    assert all(age <= bound for age in run.ages)


def test_bounded_makes_progress_and_uses_its_bound() -> None:
    ages = []
    for seed in range(20):
        run = Run(seed, batch=2, bound=2, num_workers=3)
        for _ in range(1000):
            run.act()
        assert run.num_trained > 10
        ages += run.ages
    assert max(ages) == 2
