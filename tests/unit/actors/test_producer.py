"""A producer's credit and leases, message by message, on a virtual clock."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from tests.helpers.actors import RecordingLog, make_system
from tests.helpers.refs import RecordedDirectory
from tests.helpers.training import make_groups
from tests.simulation.loop import run_virtual

from ratchet.actors.producer import GiveUp, HandedIn, HandIn, ProducerActor, PromptTaken, TakePrompt
from ratchet.errors import AskTimeout, VersionError
from ratchet.messages import (
    ClaimPrompts,
    DescribeLineage,
    Down,
    GroupFailed,
    GroupFinished,
    LineageDescribed,
    Message,
    PromptsClaimed,
    RegisterRole,
    RoleJoined,
    RoleRegistered,
    RunEnded,
    VersionUpdated,
)
from ratchet.types import Assignment, Prompt, RoleInfo, VersionRecord, VersionSpan

BUFFER = RoleInfo("buffer", "buffer", "b1")
ROLE = RoleInfo("producer", "mine", "p1")
LIVE = VersionRecord(0, 1, 0, None, "live")
LEASE_S = 10.0


class World:
    """A producer; buffer and registry answer by script."""

    def __init__(self, *, ahead: int = 0, versions: tuple[VersionRecord, ...] = (LIVE,)) -> None:
        self.versions = versions
        self.reserved = (LIVE, VersionRecord(1, 1, 1, 0, "reserved"))
        self.others = RecordedDirectory()
        self.buffer = self.others.ref("buffer")
        self.others.ref("registry").answer = self._registry
        self.log = RecordingLog()
        system = make_system(remote=self.others, log=self.log)
        self.ref = ProducerActor.start(system, ROLE, ahead=ahead)

    def _registry(self, message: Message) -> Message:
        match message:
            case RegisterRole():
                return RoleRegistered((BUFFER,), self.versions)
            case DescribeLineage():
                found = [r for r in self.reserved if r.version in message.versions]
                return LineageDescribed(tuple(found))
        raise AssertionError(message)

    @property
    def credits(self) -> list[int]:
        return [message.credit for message in self.buffer.of(ClaimPrompts)]

    def take(self, within_s: float = 100.0) -> asyncio.Task[PromptTaken]:
        async def ask() -> PromptTaken:
            return await self.ref.ask(TakePrompt(within_s), block=False, timeout=within_s + 1)

        return asyncio.create_task(ask())

    def issue(self, *group_ids: int, incarnation: str = "p1") -> None:
        prompts = [Assignment(g, 0, 0, Prompt(f"p{g}", "1>"), 4, LEASE_S) for g in group_ids]
        self.ref.tell(PromptsClaimed(incarnation, tuple(prompts), BUFFER.incarnation))


def settle() -> Any:
    return asyncio.sleep(0.5)


def test_a_prompt_is_claimed_when_it_is_asked_for() -> None:
    async def main() -> None:
        world = World()
        await settle()
        assert world.credits == []
        first, second = world.take(), world.take()
        await settle()
        assert world.credits[-1] == 2
        world.issue(7, 8)
        assert [(await t).assignment.group_id for t in (first, second)] == [7, 8]
        assert world.credits[-1] == 2
        task = world.take()
        await settle()
        assert world.credits[-1] == 3
        world.ref.tell(RoleJoined(RoleInfo("buffer", "buffer", "b2")))
        await settle()
        assert world.credits[-2:] == [3, 1]  # for a new life of the buffer the count begins anew
        world.ref.tell(Down("buffer", "buffer has restarted"))  # what was said before went to it
        await settle()
        assert world.credits[-3:] == [3, 1, 1]
        world.issue(9)  # of the old one: the new one issues it again
        await settle()
        (refused,) = world.log.named("claim_from_another_life")
        assert refused["buffer"] == "b1"
        assert not task.done()

    run_virtual(main())


def test_a_claim_is_repeated_while_somebody_waits_and_lapsed_groups_are_not_counted() -> None:
    async def main() -> None:
        world = World()
        world.take()
        await asyncio.sleep(25.0)
        assert world.credits == [1, 1, 1]  # the first may be lost
        world.issue(0)
        await asyncio.sleep(LEASE_S + 1)  # it is kept too long
        world.take()
        await settle()
        assert world.credits[-1] == 1  # given back by the buffer
        await world.ref.ask(HandIn(make_groups(1)[0]), block=False, timeout=5)
        world.take()
        await settle()
        assert world.credits[-1] == 3  # its late end counts after all

    run_virtual(main())


def test_prompts_ahead_are_claimed_too() -> None:
    async def main() -> None:
        world = World(ahead=2)
        taken = world.take()
        await settle()
        assert world.credits[-1] == 3
        world.issue(1, 2, 3)
        await taken
        await world.take()
        assert world.credits[-1] == 4  # one lies here, and one is on its way

    run_virtual(main())


def test_nothing_is_claimed_before_a_version_is_live() -> None:
    async def main() -> None:
        world = World(versions=(VersionRecord(0, 1, 0, None, "reserved"),))
        world.take()
        await settle()
        assert world.credits == []
        world.ref.tell(VersionUpdated(LIVE))
        await settle()
        assert world.credits == [1]

    run_virtual(main())


def test_an_ask_that_ends_leaves_its_prompt_to_the_next() -> None:
    async def main() -> None:
        world = World()
        with pytest.raises(AskTimeout, match="mine waited 3 s on buffer for a prompt"):
            await world.take(3.0)
        world.issue(1)
        await settle()
        assert (await world.take()).assignment.group_id == 1
        assert max(world.credits) == 1

    run_virtual(main())


def test_a_prompt_whose_lease_is_over_is_not_handed_out() -> None:
    async def main() -> None:
        world = World()
        world.issue(1)
        await asyncio.sleep(LEASE_S + 1)
        world.issue(2, incarnation="another life")
        taken = world.take()
        await settle()
        assert not taken.done()
        assert world.log.named("claim_of_another_life")
        assert world.credits[-1] == 1  # the buffer has given the credit of the lapsed one back
        world.issue(3)
        assert (await taken).assignment.group_id == 3

    run_virtual(main())


def test_a_group_is_handed_in_under_its_lease_and_names_versions_of_the_run() -> None:
    async def main() -> None:
        world = World()
        await settle()
        for group_id in (0, 1, 2):
            world.issue(group_id)
        groups = make_groups(3)
        for _ in groups:
            await world.take()
        handed: HandedIn = await world.ref.ask(HandIn(groups[0]), block=False, timeout=5)
        assert handed.in_time
        await asyncio.sleep(LEASE_S)
        handed = await world.ref.ask(HandIn(groups[1]), block=False, timeout=5)
        assert not handed.in_time
        assignment = Assignment(2, 0, 0, Prompt("p2", "1>"), 4, LEASE_S)
        world.ref.tell(GiveUp(assignment, "reward", "cannot judge"))
        await settle()
        finished = world.buffer.of(GroupFinished)
        assert [m.group for m in finished] == groups[:2]
        assert finished[-1].stats.finished_groups == 2
        assert finished[-1].stats.generated_tokens == sum(g.num_tokens for g in groups[:2])
        (failed,) = world.buffer.of(GroupFailed)
        assert (failed.group_id, failed.reason) == (2, "reward")
        assert failed.stats.in_flight_groups == 0

    run_virtual(main())


def test_a_version_that_was_only_reserved_may_be_named_and_one_that_never_was_not() -> None:
    async def main() -> None:
        def stamped(version: int) -> Any:
            (group,) = make_groups(1)
            rollouts = [
                msgspec.structs.replace(r, spans=(VersionSpan(version, 0, len(r.completion_ids)),))
                for r in group.rollouts
            ]
            return msgspec.structs.replace(group, rollouts=tuple(rollouts))

        world = World()
        await settle()
        await world.ref.ask(HandIn(stamped(1)), block=False, timeout=5)
        with pytest.raises(VersionError, match=r"names versions \[2\], which this run has never"):
            await world.ref.ask(HandIn(stamped(2)), block=False, timeout=5)
        assert len(world.buffer.of(GroupFinished)) == 1

    run_virtual(main())


def test_the_end_of_the_run_ends_the_producer() -> None:
    async def main() -> None:
        world = World()
        await settle()
        world.ref.tell(RunEnded("finished", "10 steps are trained"))
        await settle()
        assert not world.ref.is_alive()

    run_virtual(main())
