from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.helpers.publishing import E0, E1, SEND_S, TERM, World, digest, fails, loaded, scenario
from tests.simulation.loop import run_virtual

from ratchet.errors import AskTimeout, StaleTerm, TransferFailed
from ratchet.messages import AbortLoad, WeightsLoaded
from ratchet.staleness import Position
from ratchet.transport.weights.base import SendReport
from ratchet.types import Packed, RoleInfo, VersionRecord, WeightManifest, WeightProbe


def test_reserved_then_sent_then_committed() -> None:
    async def body(world: World) -> None:
        published = await world.publish(0)
        assert published[:4] == (0, ("rollout-0", "rollout-1"), (), SEND_S + 1)
        assert [event[0] for event in world.events] == [
            "reserve", "step", "plan", "load", "load", "sent", "commit",
        ]  # fmt: skip
        assert world.of("plan") == [(0, ("rollout-0/a", "rollout-1/b"))]
        assert world.of("commit") == [(0, digest(0))]
        assert world.publisher.live == 0
        assert world.publisher.holders == {"rollout-0": E0, "rollout-1": E1}
        await world.publish(1)
        assert world.of("reserve") == [(0, 0, None), (1, 1, 0)]
        assert world.publisher.position == Position(1, 1)

    scenario(body)


def test_it_goes_on_from_the_versions_of_earlier_terms() -> None:
    async def body(world: World) -> None:
        records = [VersionRecord(v, 1, v, v - 1 if v else None, "live") for v in range(3)]
        world.publisher.begin(TERM, records)
        assert len(world.publisher.lineage) == 3
        with pytest.raises(RuntimeError, match="not reserved"):
            _ = world.publisher.position

    scenario(body)


def test_it_descends_from_the_base_model_whose_number_was_heard() -> None:
    async def body(world: World) -> None:
        lost = VersionRecord(0, 1, 0, None, "burnt")  # the answer to its reservation, that is
        records = (lost, VersionRecord(1, 1, 0, None, "live"), VersionRecord(2, 1, 1, 1, "live"))
        world.publisher.begin(TERM, records)
        world.next = 3
        await world.publish(0)
        assert world.of("reserve") == [(3, 0, 1)]
        assert world.publisher.lineage.staleness(2, world.publisher.position) == 1

    scenario(body)


def test_nothing_loaded_is_burnt_and_the_next_version_descends_from_it() -> None:
    async def body(world: World) -> None:
        await world.publish(0)
        world.engines = {
            "rollout-0": fails(TransferFailed("link lost")),
            "rollout-1": fails(AskTimeout("no reply")),
        }
        published = await world.publish(1)
        assert (published.loaded, published.failed) == ((), (E0, E1))
        assert world.of("burn") == [(1, "link lost; no reply")]
        assert world.publisher.live is None
        assert world.publisher.holders == {}
        assert world.publisher.position == Position(1, 1)
        world.engines = {}
        await world.publish(2)
        assert world.of("reserve")[-1] == (2, 2, 1)
        assert world.of("commit")[-1] == (2, digest(2))
        assert world.publisher.lineage.staleness(0, world.publisher.position) == 2

    scenario(body)


def test_no_engine_at_all_burns_without_a_transfer() -> None:
    async def body(world: World) -> None:
        world.rollouts = ()
        await world.publish(0)
        assert world.of("burn") == [(0, "no engine is alive")]
        assert world.of("plan") == []

    scenario(body)


def test_published_again_it_is_the_same_step_under_a_new_number() -> None:
    async def body(world: World) -> None:
        world.rollouts = ()
        await world.publish(7)
        world.rollouts = (E1,)
        published = await world.publisher.publish_again()
        assert published.loaded == ("rollout-1",)
        assert world.of("reserve") == [(0, 7, None), (1, 7, 0)]
        assert world.publisher.position == Position(1, 7)
        assert (await world.publisher.publish_again()).version == 1  # there is no need any more
        assert len(world.of("reserve")) == 2

    scenario(body)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (loaded("rollout-0", "other"), "holds digest other, the trainer sent digest-0"),
        (fails(TransferFailed("its own words")), "its own words"),
        (fails(AskTimeout("no reply within 60 s")), "no reply within 60 s"),
    ],
)
def test_one_engine_fails_and_the_other_has_the_version(
    answer: Callable[[int], WeightsLoaded], words: str
) -> None:
    async def body(world: World) -> None:
        world.engines = {"rollout-0": answer}
        published = await world.publish(0)
        assert (published.loaded, published.failed) == (("rollout-1",), (E0,))
        assert world.publisher.live == 0
        assert world.publisher.holders == {"rollout-1": E1}
        assert world.of("commit") == [(0, digest(0))]
        (failure,) = world.log.named("engine_failed")
        assert failure["engine"] == "rollout-0"
        assert words in failure["detail"]

    scenario(body)


def test_wrong_digests_everywhere_publish_nothing() -> None:
    async def body(world: World) -> None:
        world.engines = {name: loaded(name, "other") for name in ("rollout-0", "rollout-1")}
        await world.publish(0)
        assert world.of("commit") == []
        assert "holds digest other" in world.of("burn")[0][1]

    scenario(body)


def test_a_lost_transfer_is_told_to_the_engines_that_wait_for_it() -> None:
    async def body(world: World) -> None:
        world.sender.fails = "rollout-1 was lost"
        world.engines = {"rollout-1": fails(TransferFailed("aborted"))}
        published = await world.publish(3)
        for name in ("rollout-0", "rollout-1"):
            aborts = world.directory.ref(name).of(AbortLoad)
            assert aborts == [AbortLoad(TERM, 0, "rollout-1 was lost")]
        assert published.loaded == ("rollout-0",)  # it had all of it before
        assert world.publisher.live == 0

    scenario(body)


def test_a_newer_trainer_at_the_registry_or_an_engine_ends_this_one() -> None:
    async def body(world: World) -> None:
        world.engines = {"rollout-0": fails(StaleTerm("refuses term 4: it has seen term 5"))}
        with pytest.raises(StaleTerm, match="seen term 5"):
            await world.publish(0)
        assert world.of("commit") == world.of("burn") == []
        world.newest_term = 5
        with pytest.raises(StaleTerm, match="term 4 is fenced by term 5"):
            async with world.publisher.changing():
                await world.publisher.reserve(1)

    scenario(body)


def test_an_unexpected_error_of_an_engine_is_not_swallowed() -> None:
    async def body(world: World) -> None:
        world.engines = {"rollout-0": fails(ZeroDivisionError("a bug"))}
        with pytest.raises(ZeroDivisionError):
            await world.publish(0)

    scenario(body)


# --- errors of its own


def test_an_error_of_the_trainers_own_leaves_no_ask_behind() -> None:
    async def main() -> None:
        world = World()

        async def unreadable(manifest: WeightManifest) -> SendReport:
            await asyncio.sleep(1)
            raise RuntimeError("cannot read the weights")

        world.sender.send = unreadable
        async with world.publisher.changing():
            await world.publisher.reserve(0)
        before = asyncio.all_tasks()
        with pytest.raises(RuntimeError, match="cannot read"):
            await world.publisher.transfer()
        assert asyncio.all_tasks() == before

    run_virtual(main())


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_probe_is_computed_while_the_weights_are_held_and_travels_with_every_offer(
    snapshot: bool,
) -> None:
    async def main() -> None:
        async def probe(seed: int) -> WeightProbe:
            world.events.append(("probe", seed))
            await asyncio.sleep(1)  # others may want the weights meanwhile
            return WeightProbe(1, Packed.of([seed], "int32"), Packed.of([], "float32"))

        world = World(snapshot=snapshot, probe=probe)
        await world.publish(3)
        assert [event[0] for event in world.events][:3] == ["probe", "reserve", "step"]
        assert [each and each.token_ids.numpy().tolist() for each in world.probes] == [[3], [3]]
        await world.step(4)
        transfer = asyncio.ensure_future(world.publisher.transfer())
        late = RoleInfo("rollout", "rollout-2", "c")
        caught_up = await world.publisher.catch_up(late)
        await transfer
        assert caught_up is not None
        assert caught_up.loaded == ("rollout-2",)
        assert world.of("probe") == [(3,), (4,)]  # once for each version
        assert [each and each.token_ids.numpy().tolist() for each in world.probes[2:]] == [[4]] * 3

    run_virtual(main())
