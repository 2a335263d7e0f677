"""The order of training under a bounded admission, and what is waited for."""

from __future__ import annotations

from tests.helpers.config import small_config
from tests.helpers.group_tables import make_table
from tests.helpers.samples import sample

from ratchet.actors.due_first import DueFirst
from ratchet.staleness import Lineage, Position
from ratchet.types import RolloutGroup


class World:
    """B = 2, versions 0 to 3, each a step after the one before."""

    def __init__(self, bound: int = 1) -> None:
        config = small_config(
            buffer={"batch_groups": 2, "max_staleness": bound, "admission": "bounded"}
        )
        self.table, _ = make_table()
        self.lineage = Lineage()
        for version in range(4):
            self.lineage.add(version, version, version - 1 if version else None)
        self.due_first = DueFirst(config.buffer, self.table, self.lineage)

    def begin(self, base: int) -> int:
        return self.table.claim(("r0", "a"), until=1e9, base=base).group_id

    def finish(self, group_id: int, version: int) -> None:
        entry = self.table.in_flight.find("r0", "a", group_id, 0)
        assert entry is not None
        rollouts = (sample(0.0, version), sample(1.0, version))
        group = RolloutGroup(group_id, 0, entry.prompt.prompt_id, 0, rollouts)
        self.table.finish(entry, group, group.versions)

    def made(self, *versions: int) -> list[int]:
        group_ids = [self.begin(version) for version in versions]
        for group_id, version in zip(group_ids, versions, strict=True):
            self.finish(group_id, version)
        return group_ids

    def choose(self, version: int) -> list[int]:
        return list(self.due_first.choose(Position(version, version)))


def test_what_finished_first_goes_first() -> None:
    world = World()
    a, b, _, _ = world.made(1, 1, 1, 1)
    assert world.choose(1) == [a, b]


def test_what_must_go_overtakes_and_the_batch_is_in_the_order_of_finish() -> None:
    world = World()
    a, _, c = world.made(1, 1, 0)
    assert world.choose(1) == [a, c]


def test_a_group_in_flight_is_waited_for_as_long_as_it_must_go() -> None:
    world = World()
    straggler = world.begin(0)
    a, _ = world.made(1, 1)
    assert world.choose(1) == []
    world.finish(straggler, 1)  # it may be younger than what it began with
    assert world.choose(1) == [a, a + 1]


def test_a_group_that_can_wait_is_not_waited_for() -> None:
    world = World()
    world.begin(1)
    a, b = world.made(1, 1)
    assert world.choose(1) == [a, b]


def test_too_many_in_flight_are_waited_for_although_none_must_go_alone() -> None:
    world = World(bound=2)
    slow = [world.begin(1) for _ in range(3)]
    a, b = world.made(2, 2)
    assert world.choose(2) == []  # the next batch could not have all three
    world.finish(slow[0], 1)
    assert world.choose(2) == [a, slow[0]]
    world.finish(slow[1], 2)
    assert world.choose(2) == [a, b]


def test_past_the_bound_nothing_in_flight_is_waited_for_and_the_finished_go_first() -> None:
    world = World()
    world.begin(0)
    _, b, c = world.made(3, 0, 1)
    assert world.choose(3) == [b, c]


def test_an_unknown_version_in_flight_is_waited_for() -> None:
    world = World()
    world.begin(7)
    a, b = world.made(1, 1)
    assert world.choose(1) == []
    world.lineage.add(7, 3, 3)
    assert world.choose(3) == [a, b]
