from __future__ import annotations

import random

import pytest

from ratchet.actors.slots import Slots, Stopwatch

GROUPS = 3
SIZE = 4


def slots(*, per_sample: bool) -> Slots:
    return Slots(groups=GROUPS, group_size=SIZE, per_sample=per_sample)


def test_by_group_a_slot_is_free_when_its_group_has_ended() -> None:
    held = slots(per_sample=False)
    tickets = [held.begin() for _ in range(GROUPS)]
    assert not any(held.end_sample(ticket) for ticket in tickets for _ in range(SIZE))
    assert held.credit == GROUPS
    held.end(tickets[0], finished=True)
    held.end(tickets[2], finished=False)
    assert held.credit == GROUPS + 2
    assert (held.num_finished, held.num_failed, held.num_in_flight) == (1, 1, 1)


def test_by_sample_a_group_more_may_come_when_so_many_samples_have_ended() -> None:
    held = slots(per_sample=True)
    tickets = [held.begin() for _ in range(GROUPS)]
    more = [held.end_sample(ticket) for ticket in (0, 1, 0, 2, 1) for ticket in [tickets[ticket]]]
    assert more == [False, False, False, True, False]
    assert held.credit == GROUPS + 1
    assert held.has_credit
    held.begin()
    assert not held.has_credit


def test_by_sample_the_last_slot_of_a_group_is_free_when_it_has_been_scored() -> None:
    held = slots(per_sample=True)
    tickets = [held.begin() for _ in range(GROUPS)]
    for ticket in tickets:
        for _ in range(SIZE):
            held.end_sample(ticket)
    assert held.credit == GROUPS + GROUPS * (SIZE - 1) // SIZE
    for ticket in tickets:
        held.end(ticket, finished=True)
    assert held.credit == 2 * GROUPS


def test_a_sample_that_ends_after_its_group_gives_nothing() -> None:
    held = slots(per_sample=True)
    ticket = held.begin()
    held.end(ticket, finished=False)
    assert not held.end_sample(ticket)
    assert held.credit == GROUPS + 1


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_whatever_ends_when_the_slots_suffice(seed: int, per_sample: bool) -> None:
    rng = random.Random(seed)
    held = slots(per_sample=per_sample)
    samples: dict[int, int] = {}  # ticket -> samples that still run
    begun = ended = 0
    most = 0
    for _ in range(2000):
        before = held.credit
        if begun < held.credit and rng.random() < 0.7:
            assert held.has_credit
            samples[held.begin()] = SIZE
            begun += 1
        elif samples:
            ticket = rng.choice(list(samples))
            if samples[ticket] and rng.random() < 0.95:
                samples[ticket] -= 1
                held.end_sample(ticket)
            else:  # scored, or failed before its time
                del samples[ticket]
                held.end(ticket, finished=True)
                ended += 1
        assert held.credit >= before
        assert held.num_in_flight == len(samples)
        assert sum(samples.values()) <= GROUPS * SIZE
        most = max(most, len(samples))
        if not per_sample:
            assert held.credit == GROUPS + ended
    bound = GROUPS * SIZE if per_sample else GROUPS
    assert GROUPS <= most <= bound
    assert (most > GROUPS) == per_sample
    for ticket in samples:
        held.end(ticket, finished=True)
    assert held.credit == GROUPS + begun  # nothing was lost on the way, and nothing came twice


def test_more_failures_in_a_row_than_groups_ask_for_an_ever_longer_rest() -> None:
    held = slots(per_sample=True)
    rests = []
    for _ in range(GROUPS + 12):
        held.end(held.begin(), finished=False)
        rests.append(held.rest_s)
    assert rests[:GROUPS] == [None] * GROUPS
    assert rests[GROUPS : GROUPS + 3] == pytest.approx([0.1, 0.2, 0.4])
    assert rests[-1] == 10.0
    ticket = held.begin()
    assert not any(held.end_sample(held.begin()) for _ in range(SIZE))  # nothing to claim for yet
    held.end(ticket, finished=True)
    assert held.rest_s is None


def test_a_stopwatch_adds_up_the_times_in_which_it_was_so() -> None:
    time = 1.0
    watch = Stopwatch(lambda: time)
    for at, was_so in ((2.0, False), (3.0, True), (5.0, True), (6.0, False), (9.5, True)):
        time = at
        watch.tick(was_so)
    assert watch.seconds == 1.0 + 2.0 + 3.5


def test_for_another_life_of_the_buffer_the_count_begins_with_the_free_slots() -> None:
    slots = Slots(groups=2, group_size=2, per_sample=False)
    slots.count_for("b1")
    first, second = slots.begin(), slots.begin()
    slots.end(first, finished=True)
    third = slots.begin()
    assert slots.credit == 3
    slots.count_for("b1")
    assert slots.credit == 3
    slots.count_for("b2")
    assert (slots.credit, slots.has_credit) == (0, False)
    slots.end(second, finished=True)  # of the old one: its slot is free
    assert (slots.credit, slots.has_credit) == (1, True)
    slots.end(third, finished=False)
    assert slots.credit == 2
    slots.begin()
    slots.begin()
    assert not slots.has_credit
