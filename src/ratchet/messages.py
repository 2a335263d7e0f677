"""Every message of the system, grouped by recipient: the contract on one page.

Events are in the past participle, commands in the imperative. A message that is asked (not told)
derives from `Ask[Reply]`. All are frozen msgspec structs, tagged by class name; the codec of the
mailbox transport decodes the union of everything listed here and nothing else. Fields that fence:
`term` (which trainer), `incarnation` (which life of a worker), `buffer` (which life of the buffer),
`attempt` (which try of a group).
"""

from __future__ import annotations

from typing import Generic, TypeAlias, TypeVar

import msgspec

from ratchet.stats import BufferStats
from ratchet.status import EndStatus, RoleReport, RunStatus
from ratchet.types import (
    Assignment,
    Batch,
    PolicyVersion,
    RoleInfo,
    RolloutGroup,
    RolloutStats,
    Term,
    VersionRecord,
    WeightManifest,
    WeightRoute,
)

R = TypeVar("R")


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of everything that is told."""


class Ask(Message, Generic[R], frozen=True):
    """Base of everything that is asked; R is the reply."""


# --- to whoever watches


class Down(Message, frozen=True):
    """A watched actor, or the process that held it, has ended. Told once per watch."""

    name: str
    reason: str


# --- to VersionRegistry


class RoleRegistered(Message, frozen=True):
    """Reply: who is there that the role deals with, and every version that was ever reserved."""

    roles: tuple[RoleInfo, ...]
    """the role itself last; to an engine (a rollout, a producer) no other engine is named"""
    versions: tuple[VersionRecord, ...]


class RegisterRole(Ask[RoleRegistered], frozen=True):
    """A role has started, or the registry has. A new incarnation of a known name replaces the old
    one. Fails with `GivenUp` or `StaleTerm` if this one is over for the others.
    """

    role: RoleInfo


class TermAcquired(Message, frozen=True):
    """Reply: the trainer's term, and every version that was ever reserved, to go on from."""

    term: Term
    versions: tuple[VersionRecord, ...]


class AcquireTerm(Ask[TermAcquired], frozen=True):
    """A trainer wants to publish; all lower terms are fenced from now on."""

    trainer: str
    incarnation: str


class VersionReserved(Message, frozen=True):
    """Reply: the durable number, and the engines that are alive to receive it."""

    version: PolicyVersion
    rollouts: tuple[RoleInfo, ...]


class ReserveVersion(Ask[VersionReserved], frozen=True):
    """Write a number down before anything is sent under it. The same again burns the first number:
    its reply was lost.
    """

    term: Term
    step: int
    parent: PolicyVersion | None


class VersionCommitted(Message, frozen=True):
    """Reply: the version is durable and live."""

    version: PolicyVersion


class CommitVersion(Ask[VersionCommitted], frozen=True):
    """At least one engine holds the version, verified: make it live and tell everyone."""

    term: Term
    version: PolicyVersion
    digest: str


class VersionBurnt(Message, frozen=True):
    """Reply: the number is spent."""

    version: PolicyVersion


class BurnVersion(Ask[VersionBurnt], frozen=True):
    """Nothing arrived anywhere: the number is never used again."""

    term: Term
    version: PolicyVersion
    reason: str


class LineageDescribed(Message, frozen=True):
    """Reply: the records of those versions that were ever reserved."""

    versions: tuple[VersionRecord, ...]


class DescribeLineage(Ask[LineageDescribed], frozen=True):
    """Someone met a version it has not heard of, and does not judge before it has."""

    versions: tuple[PolicyVersion, ...]


class RunDescribed(Message, frozen=True):
    """Reply: the run, for whoever wants to join it or look at it."""

    run_id: str
    config: str
    """TOML, resolved"""
    status: RunStatus


class DescribeRun(Ask[RunDescribed], frozen=True):
    """What run is this, and how does it do?"""


class RoleReported(Message, frozen=True):
    """A role's process, of itself; the next one replaces it."""

    report: RoleReport


class EndRun(Message, frozen=True):
    """The trainer is done, or a supervisor has given a role up: the run ends everywhere."""

    who: str
    status: EndStatus
    reason: str
    term: Term | None = None
    """of the trainer that is done; a fenced one ends nothing"""


# --- to BufferActor


class ClaimPrompts(Message, frozen=True):
    """Credit for prompt groups, as a running total of this incarnation for one life of the buffer:
    safe to repeat, to lose and to reorder.
    """

    worker: str
    incarnation: str
    credit: int
    version: PolicyVersion = 0
    """No token of a group that is issued on this credit is older; 0 from who does not know."""
    buffer: str = ""
    """life of the buffer that the total counts for: for each the count begins anew, with the slots
    that are free"""


class GroupFinished(Message, frozen=True):
    """All rollouts of a claimed group are generated and scored."""

    worker: str
    incarnation: str
    group: RolloutGroup
    stats: RolloutStats


class GroupFailed(Message, frozen=True):
    """A claimed group could not be generated or scored: a failure, not a zero reward."""

    worker: str
    incarnation: str
    group_id: int
    attempt: int
    reason: str
    """one word: "generation" | "prompt" | "timeout" | "reward", or a kind of it: `RewardFailed` """
    detail: str
    stats: RolloutStats


class RequestBatch(Message, frozen=True):
    """The trainer is free. Idempotent: the same (term, step) gets the same batch again."""

    trainer: str
    term: Term
    version: PolicyVersion
    step: int
    """optimiser steps taken so far; the batch takes step + 1"""
    done: StepTrained | None = None
    """the account of the batch before, in case that message was lost"""
    buffer: str = ""
    """life of the buffer that is asked; another one's batch is not taken any more"""


class StepTrained(Message, frozen=True):
    """An optimiser step is done with a batch."""

    term: Term
    step: int
    """the step just taken, or skipped"""
    trained: tuple[int, ...]
    """ids of the groups that were trained"""
    rejected: dict[int, str]
    """groups of the batch that were not trained, with the reason: "stale" | "non_finite" |
    "filter:batch" | "no_tokens" """
    attempts: dict[int, int] = {}
    """by group: its attempt in that batch. The same groups may come again, for the same step"""


class CheckpointWritten(Message, frozen=True):
    """A checkpoint is whole: what its trainer was trained on up to this step needs no payload."""

    term: Term
    step: int


# --- to RolloutActor


class PromptsClaimed(Message, frozen=True):
    """Prompt groups for this worker, each under a lease."""

    incarnation: str
    """of the worker they are meant for; another life of it hands nothing out"""
    assignments: tuple[Assignment, ...]
    buffer: str = ""
    """life of the buffer that hands them out; another one takes back what it does not know to be
    finished"""


class WeightsLoaded(Message, frozen=True):
    """Reply: the engine holds the version, verified by the digest of what it holds, and generates
    again.
    """

    worker: str
    version: PolicyVersion
    digest: str
    move_s: float
    load_s: float
    paused_s: float


class LoadWeights(Ask[WeightsLoaded], frozen=True):
    """Join a transfer and take a version. Fails with `StaleTerm`, `VersionError`, `TransferFailed`
    or `WeightsMismatch`.
    """

    incarnation: str
    """of the worker it is meant for; another life of it would answer in its place"""
    manifest: WeightManifest
    route: WeightRoute


class AbortLoad(Message, frozen=True):
    """The transfer of this version will not complete: stop waiting for it."""

    term: Term
    version: PolicyVersion
    reason: str


class PolicyEvaluated(Message, frozen=True):
    """Reply: one reward per prompt asked for, in order; None where generation or scoring failed."""

    version: PolicyVersion
    rewards: tuple[float | None, ...]
    """mean over the samples of each prompt"""
    tasks: tuple[str, ...] = ()
    """of several tasks, the label of each prompt's"""


class EvaluatePolicy(Ask[PolicyEvaluated], frozen=True):
    """Score held-out prompts with one version. Fails if a token came from another one."""

    version: PolicyVersion
    first: int
    """index of the first prompt of the task's eval split"""
    count: int
    samples: int
    temperature: float


# --- to TrainerActor


class BatchReady(Message, frozen=True):
    """A batch for the step that was asked for."""

    term: Term
    batch: Batch
    stats: BufferStats
    buffer: str = ""
    """life of the buffer that hands it out"""


class StopTraining(Message, frozen=True):
    """Finish the step in hand, publish, save, and end the run."""

    reason: str


# --- to several: buffer, rollouts and trainer hear from the registry


class VersionUpdated(Message, frozen=True):
    """A version is live."""

    record: VersionRecord


class RoleJoined(Message, frozen=True):
    """A role has started, or has started again under a new incarnation.

    Buffer and trainers hear of every role, engines (rollouts, producers) of no other engine.
    """

    role: RoleInfo


class RoleLeft(Message, frozen=True):
    """A role has ended; its leases end with it. Heard by those who would hear that it joined."""

    role: RoleInfo
    reason: str


class RunEnded(Message, frozen=True):
    """The run is over, for whoever hears it."""

    status: EndStatus
    reason: str


RegistryMessage: TypeAlias = (
    RegisterRole
    | AcquireTerm
    | ReserveVersion
    | CommitVersion
    | BurnVersion
    | DescribeLineage
    | DescribeRun
    | RoleReported
    | EndRun
    | Down
)
BufferMessage: TypeAlias = (
    ClaimPrompts
    | GroupFinished
    | GroupFailed
    | RequestBatch
    | StepTrained
    | CheckpointWritten
    | VersionUpdated
    | RoleJoined
    | RoleLeft
    | RunEnded
)
RolloutMessage: TypeAlias = (
    PromptsClaimed
    | LoadWeights
    | AbortLoad
    | EvaluatePolicy
    | VersionUpdated
    | RoleJoined
    | RoleLeft
    | RunEnded
)
TrainerMessage: TypeAlias = (
    BatchReady | StopTraining | VersionUpdated | RoleJoined | RoleLeft | RunEnded
)
Reply: TypeAlias = (
    RoleRegistered
    | TermAcquired
    | VersionReserved
    | VersionCommitted
    | VersionBurnt
    | LineageDescribed
    | RunDescribed
    | WeightsLoaded
    | PolicyEvaluated
)
WireMessage: TypeAlias = RegistryMessage | BufferMessage | RolloutMessage | TrainerMessage | Reply
"""Everything that may cross a link."""
