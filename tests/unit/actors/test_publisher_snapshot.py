"""A publisher with a snapshot, which steps do not wait for."""

from __future__ import annotations

import asyncio

from tests.helpers.publishing import COPY_S, E0, E1, LATE, SEND_S, TERM, World, digest, scenario

from ratchet.messages import AbortLoad


def test_with_a_snapshot_a_step_waits_for_the_copy_alone() -> None:
    async def body(world: World) -> None:
        await world.step(0)
        transfer = asyncio.ensure_future(world.publisher.transfer())
        await asyncio.sleep(0)
        await world.step(1)
        assert world.of("step") == [(0, 0.0), (1, COPY_S)]
        published = await transfer
        assert published.loaded == ("rollout-0", "rollout-1")
        assert world.publisher.live is None  # these weights are not in hand any more
        assert world.publisher.holders == {}
        await world.publisher.transfer()
        assert world.publisher.live == 1
        assert world.of("commit") == [(0, digest(0)), (1, digest(1))]

    scenario(body, snapshot=True)


def test_a_commit_that_comes_while_the_next_number_is_asked_for_is_of_old_weights() -> None:
    async def body(world: World) -> None:
        await world.step(0)
        transfer = asyncio.ensure_future(world.publisher.transfer())
        await asyncio.sleep(COPY_S)
        world.reserve_s = 1000.0  # the commit of 0 falls into it
        await world.step(1)
        await transfer
        assert world.of("commit") == [(0, digest(0))]
        assert world.publisher.version == 1
        assert world.publisher.live is None
        assert world.publisher.holders == {}

    scenario(body, snapshot=True)


def test_steps_faster_than_transfers_burn_what_waits_and_send_the_newest() -> None:
    async def body(world: World) -> None:
        transfers = []
        for step in range(4):
            await world.step(step)
            transfers.append(asyncio.ensure_future(world.publisher.transfer()))
            await asyncio.sleep(1)
        await asyncio.gather(*transfers)
        assert world.of("step") == [(step, float(step)) for step in range(4)]
        assert world.of("copied") == [(version,) for version in range(4)]
        assert world.of("commit") == [(0, digest(0)), (3, digest(3))]
        assert world.of("burn") == [
            (version, "overtaken by version 3 before its transfer") for version in (1, 2)
        ]
        assert [version for version, _ in world.of("plan")] == [0, 3]
        assert world.publisher.live == 3
        assert world.publisher.lineage.staleness(0, world.publisher.position) == 3

    scenario(body, snapshot=True)


def test_a_catch_up_from_a_snapshot_outlives_a_step_and_gives_way_to_its_transfer() -> None:
    async def body(world: World) -> None:
        await world.publish(0)
        catching_up = asyncio.ensure_future(world.publisher.catch_up(LATE))
        await asyncio.sleep(1)
        before = world.now()
        await world.step(1)
        assert world.of("step")[1] == (1, before)
        assert not catching_up.done()
        transfer = asyncio.ensure_future(world.publisher.transfer())
        cut = await catching_up
        assert cut is not None
        assert cut[:3] == (0, (), (LATE,))
        (abort,) = world.directory.ref(LATE.name).of(AbortLoad)
        assert abort == AbortLoad(TERM, 0, "version 1 goes to every engine")
        assert world.now() == before + COPY_S
        await transfer
        assert world.of("commit")[-1] == (1, digest(1))

    scenario(body, snapshot=True)


def test_a_catch_up_that_ends_after_a_step_does_not_hold_the_newer_version() -> None:
    async def body(world: World) -> None:
        await world.publish(0)
        catching_up = asyncio.ensure_future(world.publisher.catch_up(LATE))
        await asyncio.sleep(SEND_S)
        await world.step(1)
        done = await catching_up
        assert done is not None
        assert done.loaded == ("rollout-2",)
        assert world.publisher.holders == {}
        await world.publisher.transfer()
        assert world.publisher.holders == {"rollout-0": E0, "rollout-1": E1}

    scenario(body, snapshot=True)
