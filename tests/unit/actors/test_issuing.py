"""Bounded admission as the buffer drives it: positions, lineages and versions of workers."""

from __future__ import annotations

from typing import Any

from tests.helpers.config import small_config
from tests.helpers.group_tables import make_table

from ratchet.actors.issuing import Issuing
from ratchet.messages import ClaimPrompts
from ratchet.staleness import Lineage, Position
from ratchet.types import Assignment, VersionRecord


def record(version: int, step: int | None = None, parent: int | None = None) -> VersionRecord:
    if parent is None and version:
        parent = version - 1
    return VersionRecord(version, 1, version if step is None else step, parent, "live")


class World:
    """B = 2, and room for all that the bound allows."""

    def __init__(self, bound: int | None, **buffer: Any) -> None:
        admission = {} if bound is None else {"admission": "bounded", "max_staleness": bound}
        config = small_config(
            buffer={"batch_groups": 2, "capacity_factor": 50.0, **admission, **buffer}
        )
        self.table, self.ledger = make_table()
        self.lineage = Lineage()
        self.issuing = Issuing(config, self.table, self.lineage)

    def learn(self, *records: VersionRecord) -> None:
        for each in records:
            self.lineage.add(each.version, each.step, each.parent)
            self.issuing.published(each)

    def claim(self, version: int, credit: int = 100, worker: str = "r0") -> list[Assignment]:
        self.issuing.claim(ClaimPrompts(worker, "a", credit, version))
        return [assignment for _, assignment in self.issuing.issue(0.0)]


def test_without_a_bound_versions_are_not_asked_for() -> None:
    world = World(None, capacity_factor=2.0)
    assert world.issuing.unknown == ()
    assert len(world.claim(version=77)) == 4
    assert world.issuing.unknown == ()
    assert world.issuing.withheld == 0


def test_nothing_is_issued_before_it_is_known_where_the_trainer_stands() -> None:
    world = World(1)
    assert world.claim(0) == []
    assert world.issuing.unknown == ()
    world.learn(record(0))
    assert len(world.claim(0)) == 4


def test_a_version_that_is_not_known_is_asked_for() -> None:
    world = World(1)
    world.learn(record(0))
    assert world.claim(2) == []
    assert world.issuing.unknown == (2,)
    world.learn(record(2, parent=1))
    assert world.issuing.unknown == (1,)  # one ancestor after the other
    world.learn(record(1))
    assert world.issuing.unknown == ()
    assert len(world.claim(2)) == 4


def test_room_shrinks_with_a_batch_and_grows_with_a_claim_from_newer_weights() -> None:
    world = World(2)
    world.learn(record(0))
    assert len(world.claim(0)) == 6
    world.issuing.trains_next(1, Position(0, 1))  # a batch is out; six groups are open still
    assert world.issuing.room(0) == 0
    for entry in list(world.table.in_flight.held_by("r0", "a"))[:4]:
        world.table.drop(entry, "reward")
    assert world.issuing.room(0) == 2  # 2 x (2 + 1 - 1) - 2
    assert world.issuing.withheld == 2
    world.learn(record(1))
    # the two in flight began with version 0, and hold nothing back: a batch waits for them
    assert (world.issuing.room(1), world.issuing.room(0)) == (4, 2)
    for entry in world.table.in_flight.held_by("r0", "a"):
        world.table.drop(entry, "reward")
    assert (world.issuing.room(1), world.issuing.room(0)) == (6, 4)


def test_the_newest_weights_are_served_first_and_old_ones_not_at_all() -> None:
    world = World(1)
    world.learn(record(0), record(1), record(2))
    assert world.claim(0, worker="old") == []  # two steps behind, the bound is 1
    assert len(world.claim(1, credit=1, worker="behind")) == 1
    issued = world.claim(2, worker="fresh")
    assert len(issued) == 3  # two batches may be open, and one group is
    assert {entry.worker for entry in world.table.in_flight.held_by("fresh", "a")} == {"fresh"}
    assert world.table.in_flight.held_by("old", "a") == []


def test_a_rejected_step_gives_its_room_back_and_a_late_event_takes_none() -> None:
    world = World(0)
    world.learn(record(0))
    world.issuing.trains_next(1, Position(0, 1))
    assert world.claim(0) == []
    world.issuing.trains_next(1, Position(0, 0))  # not finite: the trainer asks for the same step
    assert len(world.claim(0)) == 2
    world.issuing.trains_next(1, Position(0, 3))
    world.learn(record(1))  # of two steps ago
    for entry in world.table.in_flight.held_by("r0", "a"):
        world.table.drop(entry, "reward")
    assert world.claim(1) == []


def test_a_new_trainer_starts_where_its_version_says() -> None:
    world = World(0)
    world.learn(record(0))
    world.issuing.trains_next(1, Position(0, 7))
    branch = VersionRecord(1, 2, 0, 0, "live")  # term 2, from the base model
    world.learn(branch)
    assert len(world.claim(1)) == 2


def test_a_reserved_number_says_nothing_of_where_its_trainer_stands() -> None:
    world = World(0)
    world.learn(record(0))
    world.lineage.add(1, 1, 0)
    world.issuing.published(VersionRecord(1, 1, 1, 0, "reserved"))
    assert len(world.claim(0)) == 2
