"""Workers of which the registry has not told the buffer: it may die before it can."""

from __future__ import annotations

from tests.helpers.buffer_world import WORKER, World, scenario

from ratchet.messages import ClaimPrompts, Down, PromptsClaimed, RoleJoined, RoleLeft


def test_the_end_of_a_worker_is_heard_though_the_registry_never_told_of_it() -> None:
    # each lease that ended gave its credit back, and the dead worker the group, for ever
    async def body(world: World) -> None:
        first = await world.claim(2)
        await world.claim(3)
        (watcher,) = world.worker.watchers  # once, and not with each claim
        watcher.tell(Down("rollout-0", "killed"))
        await world.tell(ClaimPrompts("rollout-1", "w9", 3, 0, "b1"))
        (claimed,) = world.others.ref("rollout-1").of(PromptsClaimed)
        assert {a.group_id for a in claimed.assignments} == {a.group_id for a in first} | {2}
        assert len(await world.claim(4)) == 0  # its last words

    scenario(body, buffer={"capacity_factor": 1.5})


def test_one_that_the_registry_has_told_of_leaves_by_its_word() -> None:
    async def body(world: World) -> None:
        await world.claim(1)
        await world.tell(RoleJoined(WORKER))
        world.worker.watchers[0].tell(Down("rollout-0", "its link is lost"))
        assert len(await world.claim(2)) == 1
        await world.tell(RoleLeft(WORKER, "killed"))
        assert await world.claim(3) == []

    scenario(body)


def test_one_that_the_registry_told_of_first_is_not_watched() -> None:
    async def body(world: World) -> None:
        await world.tell(RoleJoined(WORKER))
        await world.claim(1)
        assert world.worker.watchers == []

    scenario(body)


def test_one_that_was_silent_is_served_again_once_the_registry_tells_of_it() -> None:
    async def body(world: World) -> None:
        await world.claim(1)
        await world.tell(Down("rollout-0", "it did not come back"))
        assert await world.claim(2) == []
        await world.tell(RoleJoined(WORKER))
        assert len(await world.claim(2)) == 1

    scenario(body)
