"""What the buffer actor holds to be too old, when, and which versions it asks about first."""

from __future__ import annotations

from tests.helpers.buffer_world import World, ids, record, scenario
from tests.helpers.samples import sample
from tests.simulation.loop import run_virtual

from ratchet.messages import DescribeLineage, RequestBatch, VersionUpdated


def test_stale_groups_are_dropped_at_get_and_counted() -> None:
    async def body(world: World) -> None:
        a, b, c, d = await world.claim(4)
        await world.finish(a, version=0)
        await world.finish(b, version=1)
        await world.finish(c, version=2)
        await world.request(version=2)  # staleness 2, 1 and 0; the bound is 1
        (ready,) = world.batches
        assert ids(ready) == [1, 2]
        assert ready.stats.staleness == (1, 0)
        assert ready.stats.dropped == {"stale": 1}
        assert world.ledger.reasons() == {"stale": 1}
        await world.finish(d, version=2)

    scenario(body, versions=3)


def test_a_step_taken_but_not_published_counts() -> None:
    async def body(world: World) -> None:
        for assignment in await world.claim(4):
            await world.finish(assignment, version=1)
        await world.request(version=1, step=3)  # two steps ahead of the version
        assert world.batches == []
        assert world.ledger.reasons() == {"stale": 4}

    scenario(body, versions=2)


def test_stale_groups_leave_when_the_version_changes() -> None:
    async def body(world: World) -> None:
        for assignment in await world.claim(10):
            await world.finish(assignment, version=0)
        assert len(world.assignments) == 4
        await world.tell(VersionUpdated(record(1)))
        assert len(world.assignments) == 4
        await world.tell(VersionUpdated(record(2)))
        assert len(world.assignments) == 8
        assert world.ledger.reasons() == {"stale": 4}

    scenario(body)


def test_late_news_of_an_older_version_judges_nothing() -> None:
    async def body(world: World) -> None:
        (a,) = await world.claim(1)
        await world.tell(VersionUpdated(record(2)))
        await world.finish(a, version=2)
        await world.tell(VersionUpdated(record(0)))  # two steps away, and the bound is 1
        assert world.ledger.counts()["finished"] == 1

    scenario(body, versions=3)


def test_a_version_never_heard_of_is_asked_for_before_it_is_judged() -> None:
    async def body(world: World) -> None:
        world.records += [record(1), record(2)]  # reserved; their events have not arrived
        a, b, *_ = await world.claim(4)
        await world.finish(a, version=2)
        await world.finish(b, version=2)
        await world.request(version=2)
        assert ids(world.batches[0]) == [0, 1]
        asked = world.others.ref("registry").of(DescribeLineage)
        assert sorted(v for m in asked for v in m.versions) == [1, 2]

    scenario(body)


def test_a_version_that_was_never_reserved_stops_the_buffer() -> None:
    async def main() -> None:
        world = World()
        await world.settle()
        (a,) = await world.claim(1)
        await world.finish(a, version=9)
        await world.settle()
        assert not world.ref.is_alive()
        (failure,) = world.system.log.named("actor_failed")
        assert "never reserved" in failure["reason"]

    run_virtual(main())


def test_a_masked_group_waits_until_nothing_of_it_is_fresh() -> None:
    async def body(world: World) -> None:
        a, b, c = await world.claim(3)
        await world.finish(a, rollouts=(sample(0.0, 0, 1), sample(1.0, 1)))
        await world.finish(b, version=0)
        await world.tell(VersionUpdated(record(2)))  # the bound is 1
        assert world.ledger.reasons() == {"stale": 1}
        (masked,) = world.ledger.groups("finished")
        assert (masked.group_id, masked.reason) == (a.group_id, "stale")
        await world.tell(RequestBatch("trainer-0", 1, 2, 2, None, "b1"))
        await world.finish(c, version=2)
        (ready,) = world.batches
        assert ids(ready) == [0, 2]
        assert ready.stats.staleness == (1, 0)  # of what is trained
        assert ready.stats.masked == {"stale": 1}
        events = [event.event for event in world.ledger.events(0)]
        assert events == ["issued", "claimed", "finished", "masked", "batched"]

    async def too_old(world: World) -> None:
        (a,) = await world.claim(1)
        await world.finish(a, rollouts=(sample(0.0, 0, 1), sample(1.0, 1)))
        for version in (2, 3):
            assert world.ledger.reasons() == {}
            await world.tell(VersionUpdated(record(version)))
        assert world.ledger.reasons() == {"stale": 1}
        assert len(world.system.log.named("group_stale")) == 2

    scenario(body, versions=2, buffer={"unused": "mask"})
    scenario(too_old, versions=2, buffer={"unused": "mask"})
