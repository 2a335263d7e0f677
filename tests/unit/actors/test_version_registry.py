from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.helpers.actors import RecordingLog, make_system
from tests.helpers.refs import RecordedDirectory
from tests.simulation.loop import run_virtual

from ratchet.actors.version_registry import VersionRegistry
from ratchet.errors import GivenUp, StaleTerm, VersionError
from ratchet.messages import (
    AcquireTerm,
    BurnVersion,
    CommitVersion,
    DescribeLineage,
    DescribeRun,
    Down,
    EndRun,
    LineageDescribed,
    RegisterRole,
    ReserveVersion,
    RoleJoined,
    RoleLeft,
    RoleReported,
    RunDescribed,
    RunEnded,
    VersionReserved,
    VersionUpdated,
)
from ratchet.runtime.role import EndOfActor
from ratchet.status import LinkRow, RoleReport
from ratchet.storage.versions import VersionStore
from ratchet.transport.mailbox.base import Ref
from ratchet.types import RoleInfo

BUFFER = RoleInfo("buffer", "buffer", "b1")
ROLLOUT = RoleInfo("rollout", "rollout-0", "r1")
Ask = Callable[..., Awaitable]


def scenario(body: Callable[[Ask, RecordedDirectory, Ref], Awaitable[None]]) -> None:
    async def main() -> None:
        others = RecordedDirectory()
        system = make_system(remote=others)
        ref = VersionRegistry.start(system, "registry", store=VersionStore.open(None))
        await body(lambda message: ref.ask(message, block=False, timeout=5), others, ref)
        await ref.stop(block=False)

    run_virtual(main())


def test_a_number_is_reserved_once_and_lives_when_committed() -> None:
    async def body(ask: Ask, others: RecordedDirectory, _: Ref) -> None:
        await ask(RegisterRole(BUFFER))
        await ask(RegisterRole(ROLLOUT))
        term = (await ask(AcquireTerm("trainer-0", "t1"))).term
        assert await ask(ReserveVersion(term, 0, None)) == VersionReserved(0, (ROLLOUT,))
        assert others.ref("buffer").of(VersionUpdated) == []
        await ask(CommitVersion(term, 0, "d0"))
        for name in ("buffer", "rollout-0"):
            (event,) = others.ref(name).of(VersionUpdated)
            assert (event.record.version, event.record.state, event.record.digest) == (
                0,
                "live",
                "d0",
            )
        assert (await ask(ReserveVersion(term, 1, 0))).version == 1
        await ask(BurnVersion(term, 1, "no engine is alive"))
        assert (await ask(ReserveVersion(term, 1, 0))).version == 2
        with pytest.raises(VersionError):
            await ask(CommitVersion(term, 1, "d1"))

    scenario(body)


def test_a_registry_that_fails_lets_go_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "versions.sqlite"

    def fails(*_: object) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(VersionRegistry, "_end_run", fails)

    async def main() -> None:
        ref = VersionRegistry.start(make_system(), "registry", store=VersionStore.open(path))
        end = EndOfActor("test")
        ref.watch(end)
        ref.tell(EndRun("trainer-0", "finished", "all steps are trained"))
        assert "a bug" in await end.reason
        VersionStore.open(path).close()

    run_virtual(main())


def test_an_older_term_is_fenced_and_told_both_terms() -> None:
    async def body(ask: Ask, _others: RecordedDirectory, _: Ref) -> None:
        old = (await ask(AcquireTerm("trainer-0", "t1"))).term
        assert (await ask(ReserveVersion(old, 0, None))).version == 0
        new = (await ask(AcquireTerm("trainer-0", "t2"))).term
        for message in (
            ReserveVersion(old, 1, 0),
            CommitVersion(old, 0, "d"),
            BurnVersion(old, 0, "late"),
        ):
            with pytest.raises(StaleTerm, match=f"term {old} is fenced by term {new}"):
                await ask(message)
        assert (await ask(ReserveVersion(new, 1, 0))).version == 1

    scenario(body)


def test_who_asks_again_for_a_term_does_not_fence_its_successor() -> None:
    """Its answer was lost with the registry, and another trainer has taken over meanwhile."""

    async def body(ask: Ask, _: RecordedDirectory, __: Ref) -> None:
        assert (await ask(AcquireTerm("trainer-0", "t1"))).term == 1
        assert (await ask(AcquireTerm("trainer-0", "t1"))).term == 2  # nobody came between
        assert (await ask(AcquireTerm("trainer-1", "t2"))).term == 3
        with pytest.raises(StaleTerm, match="term 2 is fenced by term 3"):
            await ask(AcquireTerm("trainer-0", "t1"))
        assert await ask(ReserveVersion(3, 0, None)) == VersionReserved(0, ())

    scenario(body)


def test_a_new_life_knows_which_of_two_trainers_is_the_newer() -> None:
    """A zombie that wakes first would be taken for a restart of the leader, and replace it."""

    async def main() -> None:
        store = VersionStore.open(None)
        for incarnation in ("t1", "t2"):
            store.acquire_term("trainer-0", incarnation, 0.0)
        system = make_system(remote=RecordedDirectory())
        ref = VersionRegistry.start(system, "registry", store=store)
        await ref.ask(DescribeRun(), block=False, timeout=5)
        assert system.book.is_newest("trainer-0", "t1") is False
        assert system.book.is_newest("trainer-0", "t2") is None  # it may be followed by a third
        await ref.ask(AcquireTerm("trainer-0", "t3"), block=False, timeout=5)
        assert system.book.is_newest("trainer-0", "t2") is False
        await ref.stop(block=False)

    run_virtual(main())


def test_lineage_is_told_before_the_commit() -> None:
    async def body(ask: Ask, _others: RecordedDirectory, _: Ref) -> None:
        term = (await ask(AcquireTerm("trainer-0", "t1"))).term
        await ask(ReserveVersion(term, 0, None))
        reply = await ask(DescribeLineage((0, 7)))
        assert isinstance(reply, LineageDescribed)
        assert [(r.version, r.state) for r in reply.versions] == [(0, "reserved")]

    scenario(body)


def test_roles_join_leave_and_are_replaced() -> None:
    async def body(ask: Ask, others: RecordedDirectory, ref: Ref) -> None:
        await ask(RegisterRole(BUFFER))
        await ask(RegisterRole(ROLLOUT))
        await ask(RegisterRole(ROLLOUT))  # again: nothing new
        reborn = RoleInfo("rollout", "rollout-0", "r2")
        reply = await ask(RegisterRole(reborn))
        assert set(reply.roles) == {BUFFER, reborn}
        told = others.ref("buffer").told
        assert told[0] == RoleJoined(ROLLOUT)
        assert isinstance(told[1], RoleLeft)
        assert told[2] == RoleJoined(reborn)
        assert len(others.ref("rollout-0").watchers) == 2
        ref.tell(Down("rollout-0", "killed"))
        ref.tell(Down("nobody", "killed"))
        term = (await ask(AcquireTerm("trainer-0", "t1"))).term
        assert (await ask(ReserveVersion(term, 0, None))).rollouts == ()
        assert others.ref("buffer").told[3:] == [RoleLeft(reborn, "killed")]

    scenario(body)


def test_who_was_given_up_or_replaced_is_not_let_in_again() -> None:
    async def body(ask: Ask, others: RecordedDirectory, ref: Ref) -> None:
        await ask(RegisterRole(ROLLOUT))
        ref.tell(Down("rollout-0", "silent for 15 s"))
        with pytest.raises(GivenUp, match=r"rollout-0 up, .* start again: silent for 15 s"):
            await ask(RegisterRole(ROLLOUT))
        await ask(RegisterRole(RoleInfo("rollout", "rollout-0", "r2")))
        first = RoleInfo("trainer", "trainer-0", "t1")
        await ask(AcquireTerm("trainer-0", "t1"))
        await ask(RegisterRole(first))
        await ask(AcquireTerm("trainer-1", "t2"))
        with pytest.raises(StaleTerm, match="term 1 is fenced by term 2"):
            await ask(RegisterRole(first))
        await ask(RegisterRole(RoleInfo("trainer", "trainer-1", "t2")))

    scenario(body)


def test_what_is_asked_again_is_not_done_twice() -> None:
    async def body(ask: Ask, others: RecordedDirectory, ref: Ref) -> None:
        await ask(RegisterRole(BUFFER))
        term = (await ask(AcquireTerm("trainer-0", "t1"))).term
        lost = (await ask(ReserveVersion(term, 0, None))).version
        version = (await ask(ReserveVersion(term, 0, None))).version
        assert version == lost + 1
        await ask(CommitVersion(term, version, "d"))
        await ask(CommitVersion(term, version, "d"))
        assert len(others.ref("buffer").of(VersionUpdated)) == 1
        records = (await ask(DescribeLineage((lost, version)))).versions
        assert [record.state for record in records] == ["burnt", "live"]
        assert records[0].reason == "the reply to its reservation was lost"

    scenario(body)


# --- the run as a whole


def own_report() -> RoleReported:
    return RoleReported(
        RoleReport("registry", "registry", "x", 1, "host", 1.0, 0.0, {}, {}, (), (), 0, ())
    )


def test_the_status_of_a_run() -> None:
    async def main() -> None:
        system = make_system(remote=RecordedDirectory())
        store = VersionStore.open(None, run="run-7")
        ref = VersionRegistry.start(
            system, "registry", store=store, run_name="sums", config="[model]", suspect_s=3.0
        )

        async def ask(message: object) -> object:
            return await ref.ask(message, block=False, timeout=5)  # type: ignore[arg-type]

        empty = await ask(DescribeRun())
        assert isinstance(empty, RunDescribed)
        assert (empty.status.live, empty.status.newest, empty.status.num_burnt) == (None, None, 0)
        await ask(RegisterRole(BUFFER))
        term = (await ask(AcquireTerm("trainer-0", "t1"))).term  # type: ignore[attr-defined]
        for version in range(3):
            await ask(ReserveVersion(term, version, version - 1 if version else None))
        await ask(CommitVersion(term, 0, "d0"))
        await ask(CommitVersion(term, 1, "d1"))
        await ask(BurnVersion(term, 2, "no engine"))
        ref.tell(own_report())
        await asyncio.sleep(60)
        described = await ask(DescribeRun())
        assert isinstance(described, RunDescribed)
        status = described.status
        assert (described.run_id, described.config) == ("run-7", "[model]")
        assert (status.name, status.uptime_s, status.term, status.end) == ("sums", 60.0, 1, None)
        assert status.live is not None
        assert (status.live.version, status.newest, status.num_burnt) == (1, 2, 1)
        assert [(r.role.name, r.up, r.report is not None) for r in status.roles] == [
            ("registry", True, True),
            ("buffer", True, False),
        ]
        assert status.suspect_s == 3.0
        ref.tell(EndRun("trainer-0", "failed", "no batch"))
        ended = await ask(DescribeRun())
        assert isinstance(ended, RunDescribed)
        assert (ended.status.end, ended.status.end_reason) == ("failed", "no batch")
        assert system.run_ended == RunEnded("failed", "no batch")
        await ref.stop(block=False)

    run_virtual(main())


def test_a_silent_role_is_suspected_once_in_the_log_and_heard_again_once() -> None:
    async def main() -> None:
        log = RecordingLog()
        system = make_system(remote=RecordedDirectory(), log=log)
        silence = [0.0, 4.0, 5.0, 6.0, 0.0, 0.0]
        now = iter(silence)
        system.links = lambda: (LinkRow("rollout-0", True, next(now), 0, 0),)
        ref = VersionRegistry.start(system, "registry", store=VersionStore.open(None))
        await ref.ask(RegisterRole(ROLLOUT), block=False, timeout=5)
        for _ in silence:
            ref.tell(own_report())
        await ref.stop(block=False)
        about = {"kind": "rollout", "name": "rollout-0", "life": "r1", "connected": True}
        suspected, recovered = log.named("role_suspected"), log.named("role_recovered")
        assert [{k: f[k] for k in (*about, "silent_s")} for f in suspected] == [
            about | {"silent_s": 5.0}
        ]
        assert [{k: f[k] for k in (*about, "silent_s")} for f in recovered] == [
            about | {"silent_s": 6.0}
        ]

    run_virtual(main())


def test_without_reports_the_registry_has_no_timer_of_its_own() -> None:
    async def main() -> None:
        system = make_system(remote=RecordedDirectory())
        ref = VersionRegistry.start(system, "registry", store=VersionStore.open(None))
        await ref.ask(RegisterRole(ROLLOUT), block=False, timeout=5)
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)
        assert [h for h in loop._scheduled if not h.cancelled()] == []  # type: ignore[attr-defined]
        await ref.stop(block=False)

    run_virtual(main())


def test_a_run_whose_trainer_does_not_come_back_ends_and_says_for_whom_it_waited() -> None:
    async def body(ask: Ask, others: RecordedDirectory, registry: Ref) -> None:
        trainer = RoleInfo("trainer", "trainer-0", "t1")
        await ask(RegisterRole(BUFFER))
        await ask(RegisterRole(trainer))
        registry.tell(Down("trainer-0", "silent for 15 s"))
        await asyncio.sleep(599)
        assert others.ref("buffer").of(RunEnded) == []
        await asyncio.sleep(2)
        (ended,) = others.ref("buffer").of(RunEnded)
        assert ended.status == "failed"
        assert ended.reason.startswith("trainer-0 is gone (silent for 15 s), and no trainer has")

    scenario(body)
