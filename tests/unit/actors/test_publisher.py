from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
from tests.helpers.actors import RecordingLog
from tests.helpers.refs import RecordedDirectory
from tests.simulation.loop import run_virtual

from ratchet.actors.publisher import Published, Publisher
from ratchet.errors import (
    ActorDead,
    AskTimeout,
    RatchetError,
    StaleTerm,
    TransferFailed,
    VersionError,
)
from ratchet.messages import (
    AbortLoad,
    BurnVersion,
    CommitVersion,
    LoadWeights,
    ReserveVersion,
    VersionBurnt,
    VersionCommitted,
    VersionReserved,
    WeightsLoaded,
)
from ratchet.staleness import Position
from ratchet.transport.mailbox.base import Ref
from ratchet.transport.weights.base import SendReport
from ratchet.types import RoleInfo, VersionRecord, WeightManifest, WeightRoute

E0 = RoleInfo("rollout", "rollout-0", "a")
E1 = RoleInfo("rollout", "rollout-1", "b")
TERM = 4
TIMEOUT_S = 60.0
SEND_S = 5.0


class Sender:
    """Takes `SEND_S` for a transfer; fails where `lost` says so."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events
        self.lost: str | None = None
        self.sending = 0

    def plan(
        self, term: int, version: int, step: int, engines: Sequence[str], *, catch_up: bool = False
    ) -> tuple[WeightManifest, Mapping[str, WeightRoute]]:
        self.events.append(("plan", version, tuple(engines)))
        routes = {e: WeightRoute("t", "b", "", 0, e, r, 2, 1.0) for r, e in enumerate(engines, 1)}
        return WeightManifest(term, version, step, (), (), {}), routes

    async def send(self, manifest: WeightManifest) -> SendReport:
        assert self.sending == 0, "two versions in flight"
        self.sending += 1
        try:
            await asyncio.sleep(SEND_S)
        finally:
            self.sending -= 1
        self.events.append(("sent", manifest.version))
        if self.lost is not None:
            raise TransferFailed(self.lost)
        return SendReport(digest(manifest.version), 8, 1, 0.0, SEND_S)

    async def close(self) -> None:
        pass


def digest(version: int) -> str:
    return f"digest-{version}"


class World:
    """A publisher; registry and engines answer by script, and every ask is an event."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.directory = RecordedDirectory()
        self.sender = Sender(self.events)
        self.log = RecordingLog()
        self.rollouts: tuple[RoleInfo, ...] = (E0, E1)
        self.next = 0
        self.newest_term = TERM
        self.engines: dict[str, Callable[[int], WeightsLoaded]] = {}
        self.publisher = Publisher(
            sender=self.sender,
            directory=self.directory,
            ask=self._ask,
            now=asyncio.get_running_loop().time,
            timeout_s=TIMEOUT_S,
            log=self.log,
        )
        self.publisher.begin(TERM, ())

    async def _ask(self, ref: Ref, message: Any, *, timeout: float | None = None) -> Any:
        await asyncio.sleep(0)
        if isinstance(message, LoadWeights):
            assert timeout is not None
            assert timeout > TIMEOUT_S
            version = message.manifest.version
            self.events.append(("load", ref.name, version))
            await asyncio.sleep(SEND_S + 1)
            return self.engines.get(ref.name, loaded(ref.name))(version)
        if message.term < self.newest_term:
            raise StaleTerm(f"term {message.term} is fenced by term {self.newest_term}")
        if isinstance(message, ReserveVersion):
            version, self.next = self.next, self.next + 1
            self.events.append(("reserve", version, message.step, message.parent))
            return VersionReserved(version, self.rollouts)
        if isinstance(message, CommitVersion):
            self.events.append(("commit", message.version, message.digest))
            return VersionCommitted(message.version)
        assert isinstance(message, BurnVersion)
        self.events.append(("burn", message.version, message.reason))
        return VersionBurnt(message.version)

    async def publish(self, step: int) -> Published:
        async with self.publisher.weights:
            await self.publisher.reserve(step)
        return await self.publisher.transfer()

    def of(self, kind: str) -> list[Any]:
        return [event[1:] for event in self.events if event[0] == kind]


def loaded(name: str, words: str | None = None) -> Callable[[int], WeightsLoaded]:
    def answer(version: int) -> WeightsLoaded:
        return WeightsLoaded(name, version, words or digest(version), 0.0, 0.0, 0.0)

    return answer


def fails(error: Exception) -> Callable[[int], WeightsLoaded]:
    def answer(version: int) -> WeightsLoaded:
        raise error

    return answer


def scenario(body: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        await body(World())

    run_virtual(main())


def test_reserved_then_sent_then_committed() -> None:
    async def body(world: World) -> None:
        published = await world.publish(0)
        assert published == Published(0, ("rollout-0", "rollout-1"), (), SEND_S + 1)
        assert [event[0] for event in world.events] == [
            "reserve", "plan", "load", "load", "sent", "commit",
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
        world.sender.lost = "rollout-1 was lost"
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
            async with world.publisher.weights:
                await world.publisher.reserve(1)

    scenario(body)


def test_an_unexpected_error_of_an_engine_is_not_swallowed() -> None:
    async def body(world: World) -> None:
        world.engines = {"rollout-0": fails(ZeroDivisionError("a bug"))}
        with pytest.raises(ZeroDivisionError):
            await world.publish(0)

    scenario(body)


# --- one at a time


def test_never_two_transfers_and_the_weights_are_locked_meanwhile() -> None:
    async def body(world: World) -> None:
        publisher = world.publisher
        async with publisher.weights:
            await publisher.reserve(0)
        transfer = asyncio.ensure_future(publisher.transfer())
        late = RoleInfo("rollout", "rollout-2", "c")
        catching_up = asyncio.ensure_future(publisher.catch_up(late))
        await asyncio.sleep(1)
        assert publisher.weights.locked()
        async with publisher.weights:
            assert world.of("sent")[0] == (0,)
        assert (await transfer).loaded == ("rollout-0", "rollout-1")
        published = await catching_up
        assert published is not None
        assert published.loaded == ("rollout-2",)
        assert world.of("plan")[1] == (0, ("rollout-2/c",))  # point to point
        assert publisher.holders == {"rollout-0": E0, "rollout-1": E1, "rollout-2": late}
        assert world.of("commit") == [(0, digest(0))]

    scenario(body)


def test_who_holds_the_version_is_not_sent_it_again_but_a_new_life_is() -> None:
    async def body(world: World) -> None:
        await world.publish(0)
        published = await world.publisher.catch_up(E0)
        assert published == Published(0, ("rollout-0",), (), 0.0)
        assert len(world.of("plan")) == 1
        reborn = RoleInfo("rollout", "rollout-0", "z")
        await world.publisher.catch_up(reborn)
        assert world.of("plan")[1] == (0, ("rollout-0/z",))
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
        async with publisher.weights:
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
        async with publisher.weights:
            again = asyncio.ensure_future(publisher.publish_again())
            await asyncio.sleep(0)
            await publisher.reserve(1)
        await asyncio.gather(publisher.transfer(), again)
        assert world.of("reserve") == [(0, 0, None), (1, 1, 0)]
        assert world.of("burn") == [(0, "no engine is alive")]
        assert world.of("commit") == [(1, digest(1))]
        assert len(world.of("plan")) == 1

    scenario(body)


@pytest.mark.parametrize(
    "refusal", [ActorDead("rollout-1 died"), VersionError("rollout-1 holds version 9")]
)
def test_an_engine_that_will_not_join_ends_the_transfer_at_once(refusal: RatchetError) -> None:
    async def main() -> None:
        world = World()

        async def ask(ref: Ref, message: Any, *, timeout: float | None = None) -> Any:
            if isinstance(message, LoadWeights):
                await asyncio.sleep(0.1)
                if ref.name == E1.name:
                    raise refusal
                raise TransferFailed("told to stop waiting")
            return await world._ask(ref, message, timeout=timeout)

        world.publisher._ask = ask
        started = asyncio.get_running_loop().time()
        async with world.publisher.weights:
            await world.publisher.reserve(0)
        published = await world.publisher.transfer()
        assert asyncio.get_running_loop().time() - started < SEND_S
        assert published.failed == (E0, E1)
        assert world.sender.sending == 0
        (abort,) = world.directory.ref(E0.name).of(AbortLoad)
        assert str(refusal) in abort.reason

    run_virtual(main())


def test_an_error_of_the_trainers_own_leaves_no_ask_behind() -> None:
    async def main() -> None:
        world = World()

        async def unreadable(manifest: WeightManifest) -> SendReport:
            await asyncio.sleep(1)
            raise RuntimeError("cannot read the weights")

        world.sender.send = unreadable
        async with world.publisher.weights:
            await world.publisher.reserve(0)
        before = asyncio.all_tasks()
        with pytest.raises(RuntimeError, match="cannot read"):
            await world.publisher.transfer()
        assert asyncio.all_tasks() == before

    run_virtual(main())
