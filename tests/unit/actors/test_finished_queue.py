"""The queue against a plain list, and what its index finds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.samples import group_of, sample

from ratchet.actors.admission import payload_bytes
from ratchet.actors.entry import Entry
from ratchet.actors.finished_queue import FinishedQueue
from ratchet.types import Prompt


def entry(group_id: int, *versions: int, length: int = 2) -> Entry:
    made = Entry(group_id, 0, Prompt("p", "p"))
    made.group = group_of(sample(0.0, *versions, length=length))
    made.versions = versions or (0,)
    return made


def put(queue: FinishedQueue, made: Entry) -> None:
    assert made.group is not None
    queue.put(made, made.group)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2), st.booleans()), max_size=80))
def test_it_is_a_list_that_finds_what_is_alike(events: list[tuple[int, int, bool]]) -> None:
    queue, model = FinishedQueue(), list[Entry]()
    for number, (group_id, version, is_long) in enumerate(events):
        found = next((each for each in model if each.group_id == group_id), None)
        if found is None:
            made = entry(group_id, *range(version, version + 1 + number % 2), length=9)
            put(queue, made)
            model.append(made)
        elif is_long:
            assert queue.take(group_id) is found
            model.remove(found)
        assert list(queue) == model
        assert list(queue.groups) == [each.group_id for each in model]
        assert list(queue.groups.values()) == [each.group for each in model]
        assert len(queue) == len(queue.groups) == len(model)
        sets = queue.sets_of_versions()
        assert sorted(sets) == sorted({each.versions for each in model})
        for versions in sets:
            alike = [each for each in model if each.versions == versions]
            assert queue.made_by(versions) == alike
        assert queue.num_bytes == sum(payload_bytes(each.group) for each in model if each.group)
    assert queue.made_by((99,)) == []


def test_sizes_are_what_came_in_also_of_what_has_gone() -> None:
    queue = FinishedQueue()
    put(queue, entry(0, length=1))
    put(queue, entry(1, length=100))
    largest = queue.num_bytes - payload_bytes(queue.groups[0])
    assert queue.largest_bytes == largest
    queue.take(1).group = None  # its arrays are freed with it
    assert (queue.num_bytes, queue.largest_bytes) == (payload_bytes(queue.groups[0]), largest)


def test_what_is_shown_cannot_be_changed() -> None:
    queue = FinishedQueue()
    put(queue, entry(3))
    shown: Any = queue.groups
    for change in ("pop", "popitem", "clear", "update", "__setitem__", "__delitem__"):
        assert not hasattr(shown, change)
    with pytest.raises(KeyError):
        shown[4]


@pytest.mark.parametrize("length", [8, 512])
def test_the_order_stays_when_all_has_changed(length: int) -> None:
    queue = FinishedQueue()
    made = [entry(number) for number in range(2 * length)]
    for each in made[:length]:
        put(queue, each)
    for each in made[length:]:
        oldest = next(iter(queue))
        assert oldest is made[each.group_id - length]
        queue.take(oldest.group_id)
        put(queue, each)
    assert made[-1] in queue
    assert made[0] not in queue
