"""A trainer whose engines fail, come late, and leave."""

from __future__ import annotations

import asyncio

from tests.helpers.trainer_world import BATCH_TIMEOUT_S, E0, E1, SEND_S, World, fails, scenario

from ratchet.messages import Down, Message, ReserveVersion, RoleJoined, RoleLeft, VersionUpdated
from ratchet.types import RoleInfo, VersionRecord


def test_a_failed_engine_is_offered_the_version_every_second_until_it_takes_it() -> None:
    async def body(world: World) -> None:
        world.rollouts = (E0, E1)
        world.engines["rollout-1"] = fails
        await world.until_request(1)  # the other one is enough
        assert [e[1:] for e in world.of("commit")] == [(0,)]
        (failed_at, _) = world.of("commit")[0]
        await asyncio.sleep(1 + SEND_S + 0.5)  # it fails again
        del world.engines["rollout-1"]
        await asyncio.sleep(60)
        loads = [event for event in world.of("load") if event[1] == "rollout-1"]
        assert [event[0] - failed_at for event in loads[1:]] == [1.0, 1.0 + SEND_S + 1.0]
        assert {event[2] for event in loads} == {0}

    scenario(body)


def test_an_engine_that_left_is_not_offered_anything() -> None:
    async def body(world: World) -> None:
        world.rollouts = (E0, E1)
        world.engines["rollout-1"] = fails
        await world.until_request(1)
        await world.tell(RoleLeft(E1, "killed"))
        await asyncio.sleep(10)
        assert len([e for e in world.of("load") if e[1] == "rollout-1"]) == 1

    scenario(body)


def test_an_engine_that_joins_late_catches_up_and_disturbs_nobody() -> None:
    async def body(world: World) -> None:
        await world.until_request(1)
        await world.tell(RoleJoined(E1), VersionUpdated(VersionRecord(0, 1, 0, None, "live")))
        await asyncio.sleep(SEND_S + 1)
        assert [e[1:] for e in world.of("load")] == [("rollout-0", 0), ("rollout-1", 0)]
        assert len(world.of("commit")) == 1

    scenario(body)


def test_an_engine_that_a_new_registry_knew_before_the_trainer_is_not_forgotten() -> None:
    async def body(world: World) -> None:
        await world.until_request(1)
        again = RoleInfo("rollout", "rollout-0", "its next life")
        world.rollouts = (again, E1)
        await world.tell(Down("registry", "the process of registry has ended"))
        await asyncio.sleep(2 * SEND_S + 1)
        loads = [e[1:] for e in world.of("load")]
        assert loads == [("rollout-0", 0), ("rollout-0", 0), ("rollout-1", 0)]
        assert len(world.of("commit")) == 1

    scenario(body)


def test_an_engine_that_joins_while_a_number_is_reserved_is_not_forgotten() -> None:
    async def body(world: World) -> None:
        registry = world.registry.answer
        assert registry is not None

        def answer(message: Message) -> Message:
            reply = registry(message)
            if isinstance(message, ReserveVersion):  # after the number, before its transfer
                world.ref.tell(RoleJoined(E1))
            return reply

        world.registry.answer = answer
        await world.until_request(1)
        await asyncio.sleep(SEND_S + 1)
        assert [e[1:] for e in world.of("load")] == [("rollout-0", 0), ("rollout-1", 0)]

    scenario(body)


def test_burnt_weights_are_published_again_under_a_new_number() -> None:
    async def body(world: World) -> None:
        await world.answer(1, 0)
        world.engines["rollout-0"] = fails
        await world.until_request(2)
        await asyncio.sleep(SEND_S + 0.5)
        assert [e[1:] for e in world.of("burn")] == [(1,)]
        del world.engines["rollout-0"]
        await asyncio.sleep(SEND_S + 1)
        assert [(r.version, r.step, r.parent) for r in world.records] == [
            (0, 0, None), (1, 1, 0), (2, 1, 1),
        ]  # fmt: skip
        assert world.of("commit")[-1][1] == 2
        await world.answer(2, 2)
        await world.end()
        assert world.records[-1].step == 2
        assert world.summaries[0]["status"] == "finished"

    scenario(body)


def test_the_first_version_is_tried_until_an_engine_takes_it() -> None:
    async def body(world: World) -> None:
        world.engines["rollout-0"] = fails
        await asyncio.sleep(SEND_S * 2)
        assert len(world.of("burn")) >= 1
        assert world.requests == []
        del world.engines["rollout-0"]
        await world.until_request(1)
        live = world.of("commit")[0][1]
        assert world.requests == [(live, 0)]

    scenario(body)


def test_without_an_engine_no_number_is_burnt() -> None:
    async def body(world: World) -> None:
        world.engines["rollout-0"] = fails
        await asyncio.sleep(SEND_S + 0.5)
        world.rollouts = ()
        await world.tell(RoleLeft(E0, "killed"))
        await asyncio.sleep(2 * SEND_S)
        burnt = len(world.of("burn"))
        await asyncio.sleep(BATCH_TIMEOUT_S / 2)
        assert len(world.of("burn")) == burnt
        world.rollouts = (E1,)
        await world.tell(RoleJoined(E1))
        await world.until_request(1)
        assert len(world.of("burn")) == burnt

    scenario(body)
