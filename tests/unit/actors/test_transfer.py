"""A transfer, as its publisher sees it: who is lost, and what it cost."""

from __future__ import annotations

import pytest
from tests.helpers.publishing import (
    COPY_S,
    E0,
    E1,
    SEND_S,
    TERM,
    World,
    digest,
    fails,
    interrupt_loads,
    scenario,
)

from ratchet.errors import (
    ActorDead,
    HandlerFailed,
    RatchetError,
    StaleTerm,
    TransferFailed,
    VersionError,
    WeightsMismatch,
)
from ratchet.messages import AbortLoad, WeightsLoaded


@pytest.mark.parametrize(
    "refusal",
    [
        ActorDead("rollout-1 died"),
        VersionError("rollout-1 holds version 9"),
        HandlerFailed("rollout-1 failed at LoadWeights: a bug"),
        TransferFailed("rollout-1 cannot reach the store"),
    ],
)
def test_an_engine_that_will_not_join_is_reported_and_the_others_get_it(
    refusal: RatchetError,
) -> None:
    async def body(world: World) -> None:
        interrupt_loads(world, 0.1, rollout_1=refusal)
        world.sender.lost = {"rollout-1/b": str(refusal)}
        published = await world.publish(0)
        assert world.of("leave") == [("rollout-1/b", str(refusal))]
        assert published[:4] == (0, ("rollout-0",), (E1,), SEND_S + 1)
        assert world.of("commit") == [(0, digest(0))]
        assert world.directory.ref(E1.name).of(AbortLoad) == []  # it has answered

    scenario(body)


def test_an_engine_with_other_weights_takes_the_rest_and_is_not_given_up() -> None:
    """It is still a member of the others' group, and a bucket that it does not take holds them."""

    async def body(world: World) -> None:
        interrupt_loads(world, 0.1, rollout_1=WeightsMismatch("no parameter of that name"))
        published = await world.publish(0)
        assert world.of("leave") == []
        assert published.failed == (E1,)

    scenario(body)


def test_a_lost_engine_that_does_not_answer_is_waited_for_no_longer_than_the_others() -> None:
    async def body(world: World) -> None:
        interrupt_loads(world, 0.0, rollout_1=None)
        world.sender.lost = {"rollout-1/b": "it stands still"}
        published = await world.publish(0)
        assert published[:4] == (0, ("rollout-0",), (E1,), SEND_S + 1 + 2)
        assert world.directory.ref(E1.name).of(AbortLoad) == [AbortLoad(TERM, 0, "it stands still")]
        assert world.directory.ref(E0.name).of(AbortLoad) == []
        (failure,) = world.log.named("engine_failed")
        assert failure["detail"] == "rollout-1 does not answer: it stands still"
        world.sender.lost = {}
        interrupt_loads(world, 0.0)
        again = await world.publisher.catch_up(E1)
        assert again is not None
        assert again.loaded == ("rollout-1",)

    scenario(body)


def test_a_newer_trainer_seen_by_one_engine_ends_the_transfer_at_once() -> None:
    async def body(world: World) -> None:
        refusal = StaleTerm("rollout-1 refuses term 4: it has seen term 5")
        interrupt_loads(world, 0.1, rollout_1=refusal)
        started = world.now()
        with pytest.raises(StaleTerm, match="refuses term 4: it has seen term 5"):
            await world.publish(0)
        assert world.now() - started < SEND_S
        assert world.of("cancelled") == [(0,)]
        assert len(world.directory.ref(E0.name).of(AbortLoad)) == 1
        assert world.of("commit") == world.of("burn") == []

    scenario(body)


# --- what it says of a sync


def test_each_sync_is_one_event_with_its_cost_by_engine() -> None:
    async def body(world: World) -> None:
        def answer(version: int) -> WeightsLoaded:
            return WeightsLoaded("rollout-0", version, digest(version), 0.1, 0.2, 0.3)

        world.engines = {"rollout-0": answer, "rollout-1": fails(TransferFailed("no room"))}
        published = await world.publish(0)
        cost = {
            "version": 0,
            "sent_bytes": 8,
            "num_buckets": 1,
            "snapshot_s": COPY_S,
            "gather_s": 0.5,
            "move_s": SEND_S,
            "load_s": 0.2,
            "paused_s": 0.3,
            "num_loaded": 1,
            "num_failed": 1,
        }
        assert published.metrics == {f"weights/{name}": value for name, value in cost.items()}
        (event,) = world.log.named("weights_published")
        assert event == {
            **cost,
            "term": TERM,
            "step": 0,
            "digest": digest(0),
            "seconds": SEND_S + 1,
            "engines": {"rollout-0": {"move_s": 0.1, "load_s": 0.2, "paused_s": 0.3}},
            "failed": {"rollout-1": "no room"},
            "shared_memory": [],
            "not_shared": "",
        }
        world.engines = {}
        await world.publisher.catch_up(E1)
        (event,) = world.log.named("weights_caught_up")
        assert (event["version"], list(event["engines"])) == (0, ["rollout-1"])

    scenario(body, snapshot=True)
