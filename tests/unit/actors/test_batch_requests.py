"""Which batch a trainer asks for, and takes."""

from __future__ import annotations

import asyncio

import msgspec
from tests.helpers.trainer_world import FORWARD_S, World, account, scenario

from ratchet.messages import Down, RequestBatch, RoleJoined, StepTrained
from ratchet.types import RoleInfo


def test_a_batch_that_is_not_due_is_never_trained() -> None:
    """The buffer may answer a repeated request twice; the second answer comes a step too late."""

    async def body(world: World) -> None:
        await world.answer(1, 0)
        await world.until_request(2)
        await world.tell(world.batch(1, 0, first=10), world.batch(2, 0, first=70, term=0))
        await asyncio.sleep(FORWARD_S)
        assert [event[1:] for event in world.of("forward")] == [(10,)]
        assert [e["step"] for e in world.log.named("batch_not_due")] == [1, 2]
        await world.answer(2, 0)
        await world.end()
        assert [event[1:] for event in world.of("forward")] == [(10,), (20,)]

    scenario(body)


def test_a_new_life_of_the_buffer_is_asked_again() -> None:
    async def body(world: World) -> None:
        await world.until_request(1)
        await world.tell(RoleJoined(RoleInfo("buffer", "buffer", "b2")))
        assert world.requests == [(0, 0), (0, 0)]
        # its own link is later than the news of it: what was said meanwhile went to the old life
        assert world.buffer.watchers
        await world.tell(Down("buffer", "buffer has restarted"))
        assert world.requests == [(0, 0)] * 3

    scenario(body)


def test_a_batch_of_a_buffer_that_another_has_followed_is_not_taken() -> None:
    async def body(world: World) -> None:
        await world.until_request(1)
        late = world.batch(1, 0, first=10)
        following = RoleInfo("buffer", "buffer", "b2")
        world.ref.tell(RoleJoined(following))
        world.ref.tell(late)
        await asyncio.sleep(1)
        assert [request.buffer for request in world.buffer.of(RequestBatch)][-2:] == ["b1", "b2"]
        assert len(world.log.named("batch_not_due")) == 1
        assert world.buffer.of(StepTrained) == []
        world.ref.tell(msgspec.structs.replace(world.batch(1, 0, first=20), buffer="b2"))
        await world.until_request(3)
        assert world.buffer.of(StepTrained) == [account(1, (20,), {})]

    scenario(body)
