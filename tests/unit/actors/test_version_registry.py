from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from tests.helpers.actors import make_system
from tests.helpers.refs import RecordedDirectory
from tests.simulation.loop import run_virtual

from ratchet.actors.version_registry import VersionRegistry
from ratchet.errors import StaleTerm, VersionError
from ratchet.messages import (
    AcquireTerm,
    BurnVersion,
    CommitVersion,
    DescribeLineage,
    Down,
    LineageDescribed,
    RegisterRole,
    ReserveVersion,
    RoleJoined,
    RoleLeft,
    VersionReserved,
    VersionUpdated,
)
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
