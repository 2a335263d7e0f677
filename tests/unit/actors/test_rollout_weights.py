"""Weights that a rollout actor loads, refuses, aborts or supersedes."""

from __future__ import annotations

import asyncio

import pytest
from tests.helpers.rollout_world import World, scenario
from tests.simulation.loop import run_virtual

from ratchet.backends.rollout.base import SamplingParams
from ratchet.errors import (
    ActorDead,
    GenerationFailed,
    StaleTerm,
    TransferFailed,
    VersionError,
    WeightsMismatch,
)
from ratchet.messages import AbortLoad, EvaluatePolicy


def test_weights_for_another_life_are_refused() -> None:
    # the trainer would take the older life's word for the newer one's, and never offer it a version
    async def body(world: World) -> None:
        with pytest.raises(VersionError, match="meant for its life life-2"):
            await world.offer(1, to="life-2")
        assert (await world.load(1)).version == 1

    scenario(body)


def test_an_older_term_is_refused_with_both_terms() -> None:
    async def body(world: World) -> None:
        await world.load(1, term=3)
        with pytest.raises(StaleTerm, match=r"rollout-0 refuses term 2.*seen term 3"):
            await world.load(2, term=2)
        assert world.engine.version == 1
        await world.load(2, term=3)
        assert world.engine.version == 2

    scenario(body)


def test_a_version_never_goes_back() -> None:
    async def body(world: World) -> None:
        await world.load(5)
        await world.load(5)  # the same again is no step back
        with pytest.raises(VersionError, match="version 5: it does not go back to 4"):
            await world.load(4)
        assert world.engine.version == 5

    scenario(body)


def test_a_version_does_not_go_back_after_a_failed_load_either() -> None:
    async def body(world: World) -> None:
        await world.load(5)
        reply = world.offer(6)
        world.arrive(6, size=9)  # another shape
        with pytest.raises(WeightsMismatch, match="came for"):
            await reply
        assert world.engine.version is None
        with pytest.raises(VersionError, match="does not go back to 5"):
            await world.load(5)
        await world.load(7)
        assert world.engine.version == 7

    scenario(body)


def test_a_failed_load_leaves_a_quarantine_and_the_next_one_ends_it() -> None:
    async def body(world: World) -> None:
        reply = world.offer(1)
        world.arrive(1, size=9)
        with pytest.raises(WeightsMismatch, match="came for"):
            await reply
        assert world.engine.version is None
        assert world.log.named("load_failed")[0]["version"] == 1
        await world.assign(0)
        await asyncio.sleep(5)
        assert world.finished == []  # it waits for weights
        await world.load(2)
        await asyncio.sleep(1)
        assert [f.group.versions for f in world.finished] == [(2,)]

    scenario(body)


def test_abort_ends_the_load_it_names_and_no_other() -> None:
    async def body(world: World) -> None:
        reply = world.offer(2)
        await world.settle()
        await world.tell(AbortLoad(0, 2, "a dead trainer's"), AbortLoad(1, 1, "an earlier one"))
        assert not reply.done()
        await world.tell(AbortLoad(1, 2, "lost: rollout-1"))
        with pytest.raises(TransferFailed, match="lost: rollout-1"):
            await reply
        assert world.engine.version == 0
        await world.tell(AbortLoad(1, 2, "again"))
        await world.load(3)
        assert world.engine.version == 3

    scenario(body)


def test_a_newer_load_supersedes_those_that_are_pending() -> None:
    async def body(world: World) -> None:
        first, second, third = (world.offer(version) for version in (1, 2, 3))
        await world.settle()
        world.arrive(3)
        assert (await third).version == 3
        for reply in (first, second):
            with pytest.raises(TransferFailed, match="superseded"):
                await reply
        assert not world.wire.passages["group-2-1"].joined.done()
        assert world.engine.version == 3

    scenario(body)


def test_a_load_takes_no_control_message_hostage_and_a_stop_ends_it() -> None:
    async def main() -> None:
        world = World()
        await world.settle()
        reply = world.offer(0)
        await world.settle()
        with pytest.raises(VersionError):
            await world.ref.ask(EvaluatePolicy(0, 0, 1, 1, 0.0), block=False, timeout=1)
        await world.ref.stop(block=False)
        with pytest.raises(ActorDead):
            await reply
        with pytest.raises(GenerationFailed, match="closed"):
            await world.engine.generate([1], SamplingParams(1, 1.0, 0))

    run_virtual(main())
