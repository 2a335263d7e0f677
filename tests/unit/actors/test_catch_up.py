"""One transfer at a time: who comes late catches up, and gives way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.helpers.publishing import (
    E0,
    E1,
    LATE,
    SEND_S,
    TERM,
    World,
    digest,
    fails,
    interrupt_loads,
    scenario,
)

from ratchet.actors.publisher import Published
from ratchet.errors import TransferFailed
from ratchet.messages import AbortLoad
from ratchet.types import RoleInfo


def test_never_two_transfers_and_the_weights_are_held_meanwhile() -> None:
    async def body(world: World) -> None:
        publisher = world.publisher
        await world.step(0)
        transfer = asyncio.ensure_future(publisher.transfer())
        late = RoleInfo("rollout", "rollout-2", "c")
        catching_up = asyncio.ensure_future(publisher.catch_up(late))
        await asyncio.sleep(1)
        async with publisher.changing():
            assert world.of("commit") == [(0, digest(0))]
        assert (await transfer).loaded == ("rollout-0", "rollout-1")
        published = await catching_up
        assert published is not None
        assert published.loaded == ("rollout-2",)
        assert world.of("plan") == [(0, ("rollout-0/a", "rollout-1/b"))]
        assert world.of("catch up") == [(0, ("rollout-2/c",))]
        assert publisher.holders == {"rollout-0": E0, "rollout-1": E1, "rollout-2": late}
        assert world.of("commit") == [(0, digest(0))]

    scenario(body)


def test_who_holds_the_version_is_not_sent_it_again_but_a_new_life_is() -> None:
    async def body(world: World) -> None:
        await world.publish(0)
        published = await world.publisher.catch_up(E0)
        assert published == Published(0, ("rollout-0",))
        assert world.of("catch up") == []
        reborn = RoleInfo("rollout", "rollout-0", "z")
        await world.publisher.catch_up(reborn)
        assert world.of("catch up") == [(0, ("rollout-0/z",))]
        assert world.publisher.holders["rollout-0"] == reborn

    scenario(body)


def test_catching_up_may_fail_again_and_holds_nothing_then() -> None:
    async def body(world: World) -> None:
        world.engines = {"rollout-0": fails(TransferFailed("still broken"))}
        await world.publish(0)
        published = await world.publisher.catch_up(E0)
        assert published is not None
        assert published.failed == (E0,)
        assert world.publisher.holders == {"rollout-1": E1}

    scenario(body)


class Pinned:
    """Pins one engine, and hears which versions go live."""

    def __init__(self, engine: RoleInfo) -> None:
        self.engine: RoleInfo | None = engine
        self.heard: list[tuple[int, tuple[str, ...]]] = []

    def pinned(self, engine: RoleInfo) -> bool:
        return engine == self.engine

    def live(self, version: int, holders: Sequence[RoleInfo]) -> None:
        self.heard.append((version, tuple(engine.name for engine in holders)))


def test_a_pinned_engine_is_offered_nothing_until_it_is_so_no_more() -> None:
    async def body(world: World) -> None:
        await world.publish(0)
        world.publisher.pins = pins = Pinned(E0)
        assert (await world.publish(1)).loaded == ("rollout-1",)
        assert await world.publisher.catch_up(E0) == Published(1)
        assert world.of("catch up") == []
        pins.engine = None
        caught_up = await world.publisher.catch_up(E0)
        assert caught_up is not None
        assert caught_up.loaded == ("rollout-0",)
        assert pins.heard == [(1, ("rollout-1",))]

    scenario(body)


def test_nothing_live_means_nothing_to_catch_up_with() -> None:
    async def body(world: World) -> None:
        world.rollouts = ()
        await world.publish(0)
        assert await world.publisher.catch_up(E0) is None

    scenario(body)


def test_who_comes_between_reserve_and_transfer_gets_the_version_after_it() -> None:
    """It is not among those that the number was reserved for, and nothing is live yet."""

    async def body(world: World) -> None:
        publisher = world.publisher
        world.rollouts = (E0,)
        async with publisher.changing():
            catching_up = asyncio.ensure_future(publisher.catch_up(E1))
            await asyncio.sleep(0)  # it stands in line before the transfer
            await publisher.reserve(0)
        await publisher.transfer()
        published = await catching_up
        assert published is not None
        assert published.loaded == ("rollout-1",)
        assert sorted(publisher.holders) == ["rollout-0", "rollout-1"]

    scenario(body)


def test_a_number_between_reserve_and_transfer_is_not_left_behind() -> None:
    """Someone publishes the burnt step again just as the next step was taken."""

    async def body(world: World) -> None:
        publisher = world.publisher
        world.rollouts = ()
        await world.publish(0)
        world.rollouts = (E0,)
        async with publisher.changing():
            again = asyncio.ensure_future(publisher.publish_again())
            await asyncio.sleep(0)
            await publisher.reserve(1)
        await asyncio.gather(publisher.transfer(), again)
        assert world.of("reserve") == [(0, 0, None), (1, 1, 0)]
        assert world.of("burn") == [(0, "no engine is alive")]
        assert world.of("commit") == [(1, digest(1))]
        assert len(world.of("plan")) == 1

    scenario(body)


# --- a catch-up gives way


def test_a_step_ends_a_catch_up_and_the_next_transfer_is_for_all() -> None:
    async def body(world: World) -> None:
        await world.publish(0)
        catching_up = [asyncio.ensure_future(world.publisher.catch_up(LATE)) for _ in range(2)]
        await asyncio.sleep(1)
        before = world.now()
        world.rollouts = (E0, E1, LATE)
        published = await world.publish(1)
        assert world.of("step")[1] == (1, before)  # nobody made it wait
        assert world.of("cancelled") == [(0,)]
        assert world.directory.ref(LATE.name).of(AbortLoad) == [
            AbortLoad(TERM, 0, "the trainer takes the next optimiser step")
        ]
        assert published.loaded == ("rollout-0", "rollout-1", "rollout-2")
        cut, later = await asyncio.gather(*catching_up)
        assert cut is not None
        assert cut[:3] == (0, (), (LATE,))
        assert later == Published(1, ("rollout-2",))  # it stood in line, and waited for version 1
        assert world.of("catch up") == [(0, ("rollout-2/c",))]

    scenario(body)


def test_who_stands_in_line_while_a_number_is_reserved_waits_for_its_transfer() -> None:
    async def body(world: World) -> None:
        await world.publish(0)
        catching_up = [asyncio.ensure_future(world.publisher.catch_up(LATE)) for _ in range(2)]
        await asyncio.sleep(1)
        await world.step(1)
        await asyncio.sleep(1)
        assert not catching_up[1].done()
        await world.publisher.transfer()  # it is not among those that the number was reserved for
        assert await catching_up[1] is not None
        assert world.publisher.holders.keys() == {"rollout-0", "rollout-1", "rollout-2"}
        await catching_up[0]

    scenario(body)


def test_a_step_does_not_wait_for_an_engine_that_has_everything_and_does_not_answer() -> None:
    async def body(world: World) -> None:
        await world.publish(0)
        interrupt_loads(world, 0.0, rollout_2=None)
        catching_up = asyncio.ensure_future(world.publisher.catch_up(LATE))
        await asyncio.sleep(SEND_S + 1)
        assert world.of("sent") == [(0,), (0,)]
        before = world.now()
        await world.step(1)
        assert world.of("step")[1] == (1, before)
        cut = await catching_up
        assert cut is not None
        assert cut[:3] == (0, (), (LATE,))
        assert len(world.directory.ref(LATE.name).of(AbortLoad)) == 1

    scenario(body)
