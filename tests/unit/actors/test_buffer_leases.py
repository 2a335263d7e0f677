"""Leases that end and workers that die: the buffer issues their prompts again, within bounds."""

from __future__ import annotations

import asyncio

from tests.helpers.buffer_world import LEASE_S, WORKER, World, ids, scenario

from ratchet.messages import ClaimPrompts, PromptsClaimed, RoleLeft
from ratchet.types import RoleInfo


def test_a_lease_ends_and_the_prompt_is_issued_again() -> None:
    async def body(world: World) -> None:
        a, b = await world.claim(2)
        await asyncio.sleep(LEASE_S / 2)
        (c,) = await world.claim(3)
        await world.finish(b)
        await asyncio.sleep(LEASE_S / 2 + 1)
        again = world.assignments[-1]  # the credit came back with the lease
        assert (again.group_id, again.attempt) == (a.group_id, 1)
        assert await world.claim(3) == []
        assert [e["group"] for e in world.system.log.named("lease_expired")] == [a.group_id]
        await world.finish(a)  # too late: its second attempt is under way
        assert world.system.log.named("late_finish")[0]["attempt"] == 0
        assert await world.claim(4) == []  # its credit was spent again
        await world.finish(again)
        await world.finish(c)
        await world.request()
        assert ids(world.batches[0]) == [b.group_id, again.group_id]
        assert world.batches[0].stats.reissued == {"lease_expired": 1}

    scenario(body)


def test_a_worker_that_dies_loses_its_leases_at_once() -> None:
    async def body(world: World) -> None:
        first = await world.claim(3)
        await world.finish(first[0])
        await world.tell(RoleLeft(WORKER, "killed"))
        assert [e["group"] for e in world.system.log.named("lease_ended")] == [1, 2]
        await world.tell(ClaimPrompts("rollout-0", "w2", 2, 0, "b1"))
        last = world.worker.of(PromptsClaimed)[-1]
        assert last.incarnation == "w2"
        assert [(a.group_id, a.attempt) for a in last.assignments] == [(1, 1), (2, 1)]

    scenario(body)


def test_a_prompt_that_kills_its_workers_is_given_up() -> None:
    async def body(world: World) -> None:
        for life in range(3):
            await world.tell(ClaimPrompts("rollout-0", f"w{life}", 1, 0, "b1"))
            await world.tell(RoleLeft(RoleInfo("rollout", "rollout-0", f"w{life}"), "killed"))
        assert world.ledger.reasons() == {"worker_died": 1}

    scenario(body, buffer={"max_reissues": 2})
