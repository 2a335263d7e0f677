"""What the buffer says of itself beside a batch, through the actor."""

from __future__ import annotations

import asyncio

from tests.helpers.buffer_world import World, record, scenario
from tests.helpers.samples import sample

from ratchet.messages import RequestBatch, StepTrained, VersionUpdated
from ratchet.types import Prompt


def test_staleness_is_told_of_what_is_queued_and_of_what_was_rejected() -> None:
    async def body(world: World) -> None:
        old, a, b, mixed, fresh = await world.claim(5)
        await world.finish(old, version=0)
        for assignment in (a, b):
            await world.finish(assignment, version=2)
        await world.finish(mixed, rollouts=(sample(0.0, 1, 2), sample(1.0, 2)))
        await world.finish(fresh, version=2)
        await world.tell(VersionUpdated(record(2)))  # the bound is 1: the oldest goes
        await world.tell(RequestBatch("trainer-0", 1, 2, 2, None, "b1"))
        stats = world.batches[0].stats
        assert stats.rejected_staleness.histogram == {2.0: 1}
        assert stats.dropped == {"stale": 1}
        assert stats.queue_staleness.histogram == {0.0: 1, 1.0: 1}
        assert (stats.offered.groups, stats.lost.groups, stats.trained.groups) == (5, 1, 0)

    scenario(body, versions=3, buffer={"capacity_factor": 3.0})


def test_times_run_from_claim_to_finish_to_the_report_of_the_step() -> None:
    async def body(world: World) -> None:
        a, b, c, d = await world.claim(4)
        await asyncio.sleep(3.0)
        for assignment in (a, b):
            await world.finish(assignment)
        await asyncio.sleep(2.0)
        await world.request()
        first = world.batches[0]
        assert first.stats.claim_to_finish_s.histogram == {3.0: 2}
        assert first.stats.finish_to_train_s.count == 0
        await asyncio.sleep(1.0)
        await world.tell(StepTrained(1, 1, (0, 1), {}))
        for assignment in (c, d):
            await world.finish(assignment)
        await world.request(step=1)
        second = world.batches[1].stats
        assert second.finish_to_train_s.histogram == {3.0: 2}  # 2 s in the queue, 1 s in the step
        assert second.claim_to_finish_s.histogram == {6.0: 2}
        assert second.trained.groups == second.offered.groups == 2

    scenario(body)


def test_rewards_are_told_by_task_of_a_mixture_only() -> None:
    async def body(world: World) -> None:
        for assignment in await world.claim(2):
            await world.finish(assignment, rewards=(0.0, 1.0))
        await world.request()
        tasks = world.batches[0].stats.offered.task_rewards
        counts = {label: each.count for label, each in tasks.items()}
        assert counts == ({"copy": 2, "sums": 2} if world.config.task.tasks else {})

    prompts = [Prompt(f"{label}/{i}", f"{i}>") for i in range(3) for label in ("copy", "sums")]
    several = [{"name": "copy"}, {"name": "copy", "label": "sums"}]
    scenario(body, prompts=prompts)
    scenario(body, prompts=prompts, task={"name": "mixture", "tasks": several, "args": {}})
