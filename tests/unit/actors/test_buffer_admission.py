"""The buffer actor under its caps, with a policy of the user's own, and what is stale at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.helpers.buffer_world import World, failed, ids, record, scenario
from tests.helpers.samples import sample
from tests.simulation.loop import run_virtual

from ratchet.messages import DescribeLineage, StepTrained, VersionUpdated
from ratchet.storage.ledger import GroupLedger
from ratchet.types import Assignment, VersionRecord

BOUNDED = {"admission": "bounded", "max_staleness": 1, "capacity_factor": 9.0}


def ids_of(*assignments: Assignment) -> tuple[int, ...]:
    return tuple(each.group_id for each in assignments)


def test_bounded_frees_a_slot_when_the_version_trained_on_it_is_there() -> None:
    async def body(world: World) -> None:
        a, b, c, _ = await world.claim(100)  # 2 x (1 + 1), whatever the capacity
        await world.finish(a)
        await world.finish(b)
        await world.request()
        await world.tell(StepTrained(1, 1, (0, 1), {}))
        world.records.append(record(1))
        await world.request(version=1)
        assert len(world.assignments) == 4
        await world.tell(VersionUpdated(record(1)))
        assert len(await world.claim(100, version=1)) == 2  # in the places of a and b
        await world.finish(c)
        await world.tell(failed(world.assignments[3]))
        assert len(world.assignments) == 7  # one finished, and three in flight

    scenario(body, buffer=BOUNDED)


def test_bounded_trains_a_straggler_before_it_is_too_old() -> None:
    async def body(world: World) -> None:
        straggler, *others = await world.claim(100)
        trained = 0
        await world.request()
        for version in range(1, 50):
            for assignment in others:
                await world.finish(assignment, version=version - 1)
            if len(world.batches) == trained:
                break
            trained, done = len(world.batches), world.batches[-1]
            world.records.append(record(version))
            await world.tell(StepTrained(1, done.batch.step, tuple(ids(done)), {}))
            await world.request(version=version)
            others = await world.claim(100, version=version)
        assert trained == 1  # the second batch must have it
        await world.finish(straggler)
        (_, second) = world.batches
        assert straggler.group_id in ids(second)
        assert max(second.stats.staleness) == 1
        assert world.ledger.reasons() == {}

    scenario(body, buffer=BOUNDED)


def test_bounded_lets_what_must_go_overtake_what_finished_first() -> None:
    async def body(world: World) -> None:
        a, b, c, d = await world.claim(100)
        await world.finish(a)
        await world.finish(b)
        await world.request()
        world.records.append(record(1))
        await world.tell(StepTrained(1, 1, ids_of(a, b), {}), VersionUpdated(record(1)))
        e, f = await world.claim(100, version=1)
        await world.finish(e, version=1)
        await world.finish(f, version=1)
        await world.finish(c)
        await world.request(version=1)
        assert len(world.batches) == 1  # it waits for d, which cannot wait
        await world.finish(d)
        assert ids(world.batches[1]) == list(ids_of(c, d))
        assert world.ledger.reasons() == {}

    scenario(body, buffer=BOUNDED)


def test_bounded_asks_for_what_a_worker_holds_and_waits_for_the_word() -> None:
    async def body(world: World) -> None:
        branch = VersionRecord(3, 1, 1, 0, "live")
        world.records.append(branch)
        assert len(await world.claim(100, version=3)) == 2  # one step from version 0, where it is
        asked = world.others.ref("registry").of(DescribeLineage)
        assert [message.versions for message in asked] == [(3,)]

    scenario(body, buffer=BOUNDED)


def test_bytes_hold_back_what_would_not_fit() -> None:
    async def body(world: World) -> None:
        a, b = await world.claim(100)  # nothing is known of sizes: one batch
        await world.finish(a, rollouts=(sample(length=100), sample(1.0, length=100)))
        assert len(world.assignments) == 2  # 1808 bytes are here, and as many may come
        await world.finish(b, rollouts=(sample(length=1), sample(1.0, length=1)))
        assert len(world.assignments) == 3
        await world.request()
        stats = world.batches[0].stats
        assert (stats.queue_groups, stats.queue_bytes) == (0, 0)
        assert len(world.assignments) == 4  # 2 x 1808 + 1808 > 4500

    scenario(body, buffer={"capacity_factor": 9.0, "max_bytes": 4500})


def test_a_group_that_is_stale_when_it_comes_holds_no_room() -> None:
    async def body(world: World) -> None:
        a, b, *_ = await world.claim(4)
        await world.tell(VersionUpdated(record(1)), VersionUpdated(record(2)))
        await world.finish(a, version=0)
        assert world.ledger.reasons() == {"stale": 1}
        assert len(world.assignments) == 4
        assert len(await world.claim(5)) == 1
        await world.finish(b, version=1)
        assert world.ledger.counts()["finished"] == 1

    scenario(body, versions=3)


def test_a_version_newer_than_the_word_of_it_is_not_judged_by_an_older_position() -> None:
    async def body(world: World) -> None:
        a, *_ = await world.claim(4)
        await world.request(version=0, step=0)
        world.records.append(record(1))
        await world.finish(a, version=1)  # its weights will ask for the next batch
        assert world.ledger.reasons() == {}

    scenario(body, buffer={"max_staleness": 0})


def custom(folder: Path, get: str, more: str = "") -> str:
    file = folder / "policy.py"
    file.write_text(
        "class Mine:\n"
        "    def __init__(self): self.seen = []\n"
        f"    def put(self, group): self.seen.append(group.group_id){more}\n"
        f"    def get(self, n, finished): return {get}\n"
        "    def metrics(self): return {'seen': len(self.seen)}\n"
    )
    return f"{file}:Mine"


def test_a_policy_of_the_users_own_orders_the_batch(tmp_path: Path) -> None:
    name = custom(tmp_path, "sorted(finished, reverse=True)[:n]")

    async def body(world: World) -> None:
        a, b, c, d = await world.claim(4)
        await world.finish(d)
        await world.finish(b, rewards=(1.0, 1.0))  # filtered: it never sees it
        await world.finish(a)
        await world.finish(c)
        await world.request()
        (ready,) = world.batches
        assert ids(ready) == [3, 2]
        assert ready.stats.custom == {"buffer/custom/seen": 3.0}
        assert [row.group_id for row in world.ledger.groups("finished")] == [0]

    scenario(body, buffer={"custom": name, "filters": ["zero_spread"]})


def test_a_policy_may_wait_for_a_finish_and_not_for_ever(tmp_path: Path) -> None:
    name = custom(tmp_path, "[] if len(finished) < 3 else list(finished)[:n]")

    async def body(world: World) -> None:
        a, b, c, _ = await world.claim(4)
        await world.request()
        await world.finish(a)
        await world.finish(b)
        assert world.batches == []
        await world.finish(c)
        assert len(world.batches) == 1

    async def for_ever() -> None:
        world = World(buffer={"custom": name, "capacity_factor": 1.0})
        await world.settle()
        a, b = await world.claim(4)
        await world.request()
        await world.finish(a)
        await world.finish(b)
        await asyncio.sleep(0)
        assert not world.ref.is_alive()
        (failure,) = world.system.log.named("actor_failed")
        assert "chose none of 2 finished groups for a batch of 2" in failure["reason"]

    scenario(body, buffer={"custom": name})
    run_virtual(for_ever())


def test_a_policy_that_makes_a_group_up_ends_the_buffer_with_its_name(tmp_path: Path) -> None:
    async def main() -> None:
        name = custom(tmp_path, "[1, 99]")
        world = World(directory=tmp_path, buffer={"custom": name})
        await world.settle()
        a, b, *_ = await world.claim(4)
        await world.finish(a)
        await world.finish(b)
        await world.request()
        assert not world.ref.is_alive()
        (failure,) = world.system.log.named("actor_failed")
        assert name in failure["reason"]
        assert "[99]" in failure["reason"]
        ledger = GroupLedger.open(tmp_path / "ledger.sqlite")
        assert ledger.counts()["batched"] == 0
        ledger.close()

    run_virtual(main())
