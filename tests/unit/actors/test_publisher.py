from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from tests.helpers.actors import RecordingLog
from tests.helpers.refs import RecordedDirectory
from tests.simulation.loop import run_virtual

from ratchet.actors.publisher import Published, Publisher
from ratchet.actors.transfer import Transfers
from ratchet.errors import (
    ActorDead,
    AskTimeout,
    HandlerFailed,
    RatchetError,
    StaleTerm,
    TransferFailed,
    VersionError,
    WeightsMismatch,
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
from ratchet.types import (
    Packed,
    RoleInfo,
    VersionRecord,
    WeightManifest,
    WeightProbe,
    WeightRoute,
)

E0 = RoleInfo("rollout", "rollout-0", "a")
E1 = RoleInfo("rollout", "rollout-1", "b")
TERM = 4
TIMEOUT_S = 60.0
SEND_S = 5.0
COPY_S = 0.5


class Sender:
    """Takes `SEND_S` for a transfer; fails where `lost` says so."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events
        self.fails: str | None = None
        self.lost: dict[str, str] = {}
        """engines, as planned, whose part is reported lost"""
        self.sending = 0

    def plan(
        self, term: int, version: int, step: int, engines: Sequence[str], *, catch_up: bool = False
    ) -> tuple[WeightManifest, Mapping[str, WeightRoute]]:
        self.events.append(("catch up" if catch_up else "plan", version, tuple(engines)))
        routes = {e: WeightRoute("t", "b", "", 0, e, r, 2, 1.0) for r, e in enumerate(engines, 1)}
        return WeightManifest(term, version, step, (), (), {}), routes

    async def send(self, manifest: WeightManifest) -> SendReport:
        assert self.sending == 0, "two versions in flight"
        self.sending += 1
        try:
            await asyncio.sleep(SEND_S)
        except asyncio.CancelledError:
            self.events.append(("cancelled", manifest.version))
            raise
        finally:
            self.sending -= 1
        self.events.append(("sent", manifest.version))
        if self.fails is not None:
            raise TransferFailed(self.fails)
        return SendReport(digest(manifest.version), 8, 1, 0.5, SEND_S, self.lost)

    def leave(self, engine: str, reason: str) -> None:
        self.events.append(("leave", engine, reason))

    async def close(self) -> None:
        pass


def digest(version: int) -> str:
    return f"digest-{version}"


class Snapshot:
    """Takes `COPY_S` for a copy."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events
        self.newest: int | None = None

    async def take(self, version: int) -> None:
        self.newest = None
        await asyncio.sleep(COPY_S)
        self.newest = version
        self.events.append(("copied", version))

    @contextmanager
    def reading(self, version: int) -> Iterator[None]:
        assert self.newest == version
        self.events.append(("reads", version))
        yield
        self.events.append(("read", version))


class World:
    """A publisher; registry and engines answer by script, and every ask is an event."""

    def __init__(self, *, snapshot: bool = False, probe: Any = None) -> None:
        self.events: list[Any] = []
        self.directory = RecordedDirectory()
        self.sender = Sender(self.events)
        self.log = RecordingLog()
        self.rollouts: tuple[RoleInfo, ...] = (E0, E1)
        self.probes: list[WeightProbe | None] = []
        """of the manifests that engines were asked to load, in order"""
        self.next = 0
        self.reserve_s = 0.0
        """how long the registry takes for a number"""
        self.newest_term = TERM
        self.engines: dict[str, Callable[[int], WeightsLoaded]] = {}
        ends: Any = {
            "directory": self.directory,
            "ask": self._ask,
            "now": asyncio.get_running_loop().time,
            "log": self.log,
        }
        self.publisher = Publisher(
            Transfers(sender=self.sender, timeout_s=TIMEOUT_S, **ends),
            **ends,
            snapshot=Snapshot(self.events) if snapshot else None,
            probe=probe,
        )
        self.publisher.begin(TERM, ())

    async def _ask(self, ref: Ref, message: Any, *, timeout: float | None = None) -> Any:
        await asyncio.sleep(0)
        if isinstance(message, LoadWeights):
            assert timeout is not None
            assert timeout > TIMEOUT_S
            version = message.manifest.version
            self.events.append(("load", ref.name, version))
            self.probes.append(message.manifest.probe)
            await asyncio.sleep(SEND_S + 1)
            return self.engines.get(ref.name, loaded(ref.name))(version)
        if message.term < self.newest_term:
            raise StaleTerm(f"term {message.term} is fenced by term {self.newest_term}")
        if isinstance(message, ReserveVersion):
            await asyncio.sleep(self.reserve_s)
            version, self.next = self.next, self.next + 1
            self.events.append(("reserve", version, message.step, message.parent))
            return VersionReserved(version, self.rollouts)
        if isinstance(message, CommitVersion):
            self.events.append(("commit", message.version, message.digest))
            return VersionCommitted(message.version)
        assert isinstance(message, BurnVersion)
        self.events.append(("burn", message.version, message.reason))
        return VersionBurnt(message.version)

    async def step(self, step: int) -> None:
        async with self.publisher.changing():
            await self.publisher.reserve(step)
            self.events.append(("step", step, self.now()))

    async def publish(self, step: int) -> Published:
        await self.step(step)
        return await self.publisher.transfer()

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()

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


def scenario(body: Callable[[World], Awaitable[None]], *, snapshot: bool = False) -> None:
    async def main() -> None:
        before = asyncio.all_tasks()
        await body(World(snapshot=snapshot))
        assert asyncio.all_tasks() == before

    run_virtual(main())


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


# --- one at a time


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


# --- who is lost


def interrupt_loads(world: World, after_s: float, **errors: Exception | None) -> None:
    """Engines by name: each raises after a while; one with None never answers."""

    async def ask(ref: Ref, message: Any, *, timeout: float | None = None) -> Any:
        name = ref.name.replace("-", "_")
        if isinstance(message, LoadWeights) and name in errors:
            await asyncio.sleep(after_s)
            error = errors[name]
            if error is None:
                await asyncio.Event().wait()
            else:
                raise error
        return await World._ask(world, ref, message, timeout=timeout)

    world.publisher._transfers._ask = ask


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


# --- a catch-up gives way


LATE = RoleInfo("rollout", "rollout-2", "c")


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


# --- with a snapshot


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
