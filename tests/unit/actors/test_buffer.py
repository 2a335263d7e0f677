"""The buffer actor: prompts go out, batches are made and trained; its facts and its ledger."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.buffer_world import LEASE_S, World, failed, finished, ids, record, scenario
from tests.simulation.loop import run_virtual

from ratchet.messages import ClaimPrompts, RequestBatch, StepTrained, VersionUpdated
from ratchet.storage.ledger import GroupLedger


def test_prompts_go_out_up_to_credit_and_capacity() -> None:
    async def body(world: World) -> None:
        assert len(await world.claim(3)) == 3
        assert len(await world.claim(10)) == 1  # capacity 2 x 2
        assert [a.group_id for a in world.assignments] == [0, 1, 2, 3]
        assert all(a.lease_s == LEASE_S and a.group_size == 2 for a in world.assignments)

    scenario(body)


def test_a_batch_is_first_in_first_out_by_finish_and_frees_its_room() -> None:
    async def body(world: World) -> None:
        a, b, c, d = await world.claim(10)
        for assignment in (d, b, a):
            await world.finish(assignment)
        assert world.batches == []
        assert len(world.assignments) == 4
        await world.request()
        (ready,) = world.batches
        assert ids(ready) == [3, 1]
        assert (ready.batch.step, ready.term) == (1, 1)
        assert ready.stats.queue_groups == 1
        assert len(world.assignments) == 6
        await world.finish(c)
        assert world.ledger.counts()["batched"] == 2

    scenario(body)


def test_a_request_waits_for_the_last_finish() -> None:
    async def body(world: World) -> None:
        a, b, *_ = await world.claim(4)
        await world.request()
        await world.finish(a)
        assert world.batches == []
        await world.finish(b)
        assert ids(world.batches[0]) == [0, 1]

    scenario(body)


def test_the_same_request_gets_the_same_batch() -> None:
    async def body(world: World) -> None:
        for assignment in await world.claim(4):
            await world.finish(assignment)
        await world.request()
        await world.request()
        first, again = world.batches
        assert first == again
        assert world.ledger.counts()["finished"] == 2

    scenario(body)


def test_trained_and_rejected_groups_are_accounted_for() -> None:
    async def body(world: World) -> None:
        for assignment in await world.claim(2):
            await world.finish(assignment)
        await world.request()
        await world.tell(StepTrained(1, 1, (0,), {1: "stale"}))
        counts = world.ledger.counts()
        assert (counts["trained"], counts["dropped"]) == (1, 1)

    scenario(body)


def test_the_account_of_an_earlier_attempt_does_not_settle_the_next_one() -> None:
    """A step that was skipped is taken again: with the same groups, where there are no others."""

    async def body(world: World) -> None:
        for assignment in await world.claim(2):
            await world.finish(assignment)
        await world.request()
        skipped = StepTrained(1, 1, (), {0: "non_finite", 1: "non_finite"}, {0: 0, 1: 0})
        await world.tell(skipped)
        for assignment in await world.claim(4):
            await world.finish(assignment)
        await world.request()
        await world.tell(RequestBatch("trainer-0", 1, 0, 0, skipped, "b1"))  # again
        await world.tell(skipped)
        assert world.ledger.counts()["batched"] == 2
        await world.tell(StepTrained(1, 1, (0, 1), {}, {0: 1, 1: 1}))
        assert world.ledger.counts()["trained"] == 2

    scenario(body, buffer={"unused": "retry"})


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_fewer_prompts_than_a_batch_come_again_in_the_next_epoch(num_prompts: int) -> None:
    async def body(world: World) -> None:
        assignments = await world.claim(4)
        assert [a.epoch for a in assignments] == [i // num_prompts for i in range(4)]

    scenario(body, num_prompts=num_prompts)


def test_the_synchronous_baseline_waits_for_the_new_version() -> None:
    async def body(world: World) -> None:
        a, b = await world.claim(10)  # one batch of room, whatever the factor
        await world.finish(a)
        await world.finish(b)
        await world.request()
        await world.tell(StepTrained(1, 1, (0, 1), {}))
        assert len(world.assignments) == 2
        await world.tell(VersionUpdated(record(1)))
        assert len(world.assignments) == 2  # the worker may still generate with version 0
        assert world.system.facts("buffer")["withheld_groups"] == 2
        assert len(await world.claim(10, version=1)) == 2

    scenario(body, trainer={"num_steps": 3, "synchronous": True})


def test_conservation_holds_in_the_ledger() -> None:
    async def body(world: World) -> None:
        a, b, c, _ = await world.claim(4)
        await world.finish(a)
        await world.finish(b)
        await world.tell(failed(c))
        await world.request()
        await world.tell(StepTrained(1, 1, (0, 1), {}))
        counts = world.ledger.counts()
        assert sum(counts.values()) == 4 + len(world.assignments) - 4
        assert counts["trained"] == 2
        assert counts["dropped"] == 1

    scenario(body)


def test_the_reward_of_all_finished_groups_is_told_beside_that_of_the_batch() -> None:
    async def body(world: World) -> None:
        a, b, c, _ = await world.claim(4)
        await world.finish(a, rewards=(1.0, 1.0))  # filtered
        await world.finish(b, rewards=(0.0, 1.0))
        await world.finish(c, rewards=(0.0, 1.0))
        await world.request()
        stats = world.batches[0].stats
        assert stats.offered.groups == 3
        assert stats.offered.rewards.mean == pytest.approx(2 / 3)
        assert (stats.lost.groups, stats.lost.rewards.mean) == (1, 1.0)

    scenario(body, buffer={"filters": ["zero_spread"]})


# --- what it says of itself


def test_its_facts_are_where_the_groups_are_and_who_waits() -> None:
    async def body(world: World) -> None:
        assert world.system.facts("buffer") == {
            "queue_groups": 0,
            "in_flight_groups": 0,
            "withheld_groups": 0,
            "capacity": 4,
            "batch_groups": 2,
            "request_step": None,
            "credit_groups": 0,
            "dropped_groups": 0,
            "retried_groups": 0,
            "reissued_groups": 0,
        }
        a, b, c, d = await world.claim(10)
        await world.request()
        await world.finish(a)
        await world.tell(failed(b))
        facts = world.system.facts("buffer")
        assert (facts["queue_groups"], facts["in_flight_groups"]) == (1, 3)
        assert (facts["request_step"], facts["credit_groups"]) == (1, 5)
        assert facts["dropped_groups"] == 1
        await world.finish(c)  # the batch goes out, and the counters since the last one with it
        assert len(world.batches) == 1
        await world.tell(failed(d))
        facts = world.system.facts("buffer")
        assert (facts["request_step"], facts["dropped_groups"]) == (None, 2)

    scenario(body)


# --- its ledger


@pytest.mark.parametrize("groups", [1, 4])
def test_the_messages_of_a_turn_are_one_transaction(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        world = World(buffer={"batch_groups": groups, "capacity_factor": 1.0})
        await world.settle()
        given = await world.claim(groups)
        flush, told_before_each = GroupLedger.flush, []

        def counted(ledger: GroupLedger) -> None:
            told_before_each.append((len(world.batches), len(world.assignments)))
            flush(ledger)

        monkeypatch.setattr(GroupLedger, "flush", counted)
        claim = ClaimPrompts("rollout-0", "w1", 2 * groups, 0, "b1")
        request = RequestBatch("trainer-0", 1, 0, 0, None, "b1")
        await world.tell(*(finished(each, 0) for each in given), claim, request)
        assert told_before_each == [(0, groups)], "once, before anybody is told anything"
        assert (len(world.batches), len(world.assignments)) == (1, 2 * groups)

    run_virtual(main())


def test_a_buffer_that_fails_lets_go_of_its_ledger_and_undoes_its_last_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        world = World(directory=tmp_path)
        await asyncio.sleep(1)

        def fails(table: Any, *args: Any, **kwargs: Any) -> int:
            group_id = issue(table, *args, **kwargs)
            if group_id == 1:
                raise LookupError("a bug")
            return group_id

        issue = GroupLedger.issue
        monkeypatch.setattr(GroupLedger, "issue", fails)
        world.ref.tell(ClaimPrompts("rollout-0", "w1", 2, 0, "b1"))
        await asyncio.sleep(1)
        assert not world.ref.is_alive()
        ledger = GroupLedger.open(tmp_path / "ledger.sqlite")
        assert ledger.groups() == ()
        ledger.close()

    run_virtual(main())
