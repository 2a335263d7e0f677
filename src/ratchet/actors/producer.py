"""ProducerActor: prompts out, groups in, for an engine that is not one of ours.

Consumes `PromptsClaimed` of the buffer; produces `GroupFinished` and `GroupFailed`, under the same
leases, credits and retries as a rollout worker. What it is asked comes from the user's code, in
this process: `TakePrompt` waits for the buffer, at most as long as it says; `HandIn` waits for the
registry where a version has not been heard of here.

A prompt is claimed when somebody asks for it, and `ahead` more: a lease begins with the claim. Like
a worker, it takes none before the run has its first live version.

A version is a claim about weights: `HandIn` refuses a number that the run has never reserved, which
the buffer could not judge.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final, assert_never

from ratchet.actors.actor import Answer
from ratchet.actors.leases import Leases
from ratchet.actors.role import BUFFER, RoleActor
from ratchet.actors.system import System
from ratchet.errors import AskTimeout, VersionError
from ratchet.messages import (
    Ask,
    ClaimPrompts,
    DescribeLineage,
    Down,
    GroupFailed,
    GroupFinished,
    LineageDescribed,
    Message,
    PromptsClaimed,
    RoleJoined,
    RoleLeft,
    RoleRegistered,
    RunEnded,
    VersionUpdated,
)
from ratchet.status import Fact
from ratchet.types import (
    Assignment,
    PolicyVersion,
    RoleInfo,
    RolloutGroup,
    RolloutStats,
    VersionRecord,
)

_REPEAT_S: Final = 10.0
"""A claim is told again so often while somebody waits."""


class PromptTaken(Message, frozen=True):
    """Reply: a prompt group that is now the asker's to finish or to fail."""

    assignment: Assignment


class TakePrompt(Ask[PromptTaken], frozen=True):
    """The user's code is free. Fails with `AskTimeout` if no prompt comes."""

    within_s: float


class HandedIn(Message, frozen=True):
    """Reply: the group is on its way."""

    in_time: bool
    """False: its lease had ended here, and the buffer will not take it"""


class HandIn(Ask[HandedIn], frozen=True):
    """A group is generated and scored. Fails with `VersionError` if a version is none."""

    group: RolloutGroup


class GiveUp(Message, frozen=True):
    """A group cannot be generated or scored."""

    assignment: Assignment
    reason: str
    detail: str


_Inbox = (
    PromptsClaimed
    | VersionUpdated
    | RoleJoined
    | RoleLeft
    | RunEnded
    | Down
    | RoleRegistered
    | TakePrompt
    | HandIn
    | GiveUp
)


class ProducerActor(RoleActor[_Inbox]):
    """Claims, leases and stamps of a foreign engine.

    Args:
        system: of this process.
        role: of kind "producer".
        ahead: prompts that are claimed before they are asked for.
    """

    def __init__(self, system: System, role: RoleInfo, *, ahead: int = 0) -> None:
        super().__init__(system, role)
        self._leases = Leases(self.now, ahead=ahead)
        self._known: set[PolicyVersion] = set()
        self._any_live = False
        self._num_waiting = 0
        self._finished = 0
        self._failed = 0
        self._tokens = 0
        self._newest: PolicyVersion | None = None
        self._started = self.now()

    def status(self) -> Mapping[str, Fact]:
        """What it holds and has done."""
        return {
            "version": self._newest,
            "in_flight_groups": self._leases.num_taken + self._leases.num_here,
            "finished_groups": self._finished,
            "failed_groups": self._failed,
            "waits_for_prompts": self._num_waiting > 0,
        }

    def receive(self, message: _Inbox) -> Answer:
        """Handle one message; what the user's code asks for is answered when it is there."""
        match message:
            case TakePrompt():
                return self._take(message.within_s)
            case HandIn():
                return self._hand_in(message.group)
            case GiveUp():
                self._give_up(message)
            case PromptsClaimed():
                self._claimed(message)
            case VersionUpdated():
                self._learn((message.record,))
            case RoleRegistered():
                if self._any_live:
                    self._claim()  # again: there may be another life of the buffer
                self._learn(message.versions)
            case RoleJoined():
                self.learn(message.role)
                if message.role.name == BUFFER:
                    self.buffer_joined()
            case Down():
                self.down(message)
            case RunEnded():
                self.run_ended(message)
            case RoleLeft():
                self.left(message.role)
            case _:
                assert_never(message)
        return None

    def _learn(self, records: Sequence[VersionRecord]) -> None:
        self._known.update(record.version for record in records)
        if not self._any_live and any(record.state == "live" for record in records):
            self._any_live = True
            self._claim()

    # --- prompts

    async def _take(self, within_s: float) -> PromptTaken:
        since = self.now()
        waits = self.system.waits
        self._num_waiting += 1
        self._claim()
        try:
            with waits.on(
                who=self.name, on=BUFFER, what="a prompt", since=since, until=since + within_s
            ):
                async with asyncio.timeout(within_s):
                    return PromptTaken(await self._next_under_lease())
        except TimeoutError:
            msg = f"{self.name} waited {within_s:g} s on {BUFFER} for a prompt"
            raise AskTimeout(msg) from None
        finally:
            self._num_waiting -= 1

    async def _next_under_lease(self) -> Assignment:
        while True:
            try:
                async with asyncio.timeout(_REPEAT_S):
                    return await self._leases.take()
            except TimeoutError:
                self._claim()  # a total: safe to repeat, and the last one may be lost

    def _claim(self) -> None:
        buffer = self.life_of(BUFFER)
        self._leases.count_for(buffer)
        credit = self._leases.claim(self._num_waiting)
        if credit and self._any_live and buffer:
            version = max(self._known) if self._newest is None else self._newest
            message = ClaimPrompts(self.name, self.role.incarnation, credit, version, buffer)
            self.system.ref(BUFFER).tell(message)

    def say_again(self) -> None:
        """A new life of the buffer knows nothing of our credit."""
        self._claim()

    def _claimed(self, message: PromptsClaimed) -> None:
        if message.incarnation != self.role.incarnation:
            self.log.warning("claim_of_another_life", meant_for=message.incarnation)
            return
        if message.buffer != self.life_of(BUFFER):
            self.log.warning("claim_from_another_life", buffer=message.buffer)
            return
        for assignment in message.assignments:
            self._leases.put(assignment)

    # --- groups

    async def _hand_in(self, group: RolloutGroup) -> HandedIn:
        await self._check(group)
        in_time = self._leases.end(group.group_id, group.attempt)
        self._finished += 1
        self._tokens += group.num_tokens
        self._newest = group.versions[-1]
        self.system.ref(BUFFER).tell(
            GroupFinished(self.name, self.role.incarnation, group, self._stats())
        )
        return HandedIn(in_time)

    async def _check(self, group: RolloutGroup) -> None:
        unknown = tuple(version for version in group.versions if version not in self._known)
        if not unknown:
            return
        reply: LineageDescribed = await self.ask(self.registry, DescribeLineage(unknown))
        self._known.update(record.version for record in reply.versions)
        missing = sorted(set(unknown) - self._known)
        if missing:
            msg = (
                f"group {group.group_id} names versions {missing}, which this run has never had:"
                " a token carries the version whose weights made it"
            )
            raise VersionError(msg)

    def _give_up(self, message: GiveUp) -> None:
        assignment = message.assignment
        self._leases.end(assignment.group_id, assignment.attempt)
        self._failed += 1
        self.system.ref(BUFFER).tell(
            GroupFailed(
                self.name,
                self.role.incarnation,
                assignment.group_id,
                assignment.attempt,
                message.reason,
                message.detail,
                self._stats(),
            )
        )

    def _stats(self) -> RolloutStats:
        return RolloutStats(
            worker=self.name,
            incarnation=self.role.incarnation,
            uptime_s=self.now() - self._started,
            busy_s=self._leases.busy_s,
            generated_tokens=self._tokens,
            finished_groups=self._finished,
            failed_groups=self._failed,
            in_flight_groups=self._leases.num_taken,
            version=self._newest,
        )
