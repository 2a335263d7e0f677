"""Faults of the life of a group: leases, credits, room, batches, and who is handed what."""

from __future__ import annotations

from typing import Any

import msgspec
from tests.simulation.faults import RepeatRequests, Sabotage
from tests.simulation.lives import Delays
from tests.simulation.mutants.base import Patches, mutant
from tests.simulation.ordinary import ordinary

from ratchet.actors import judging
from ratchet.actors.admission import OpenGroups
from ratchet.actors.batch_requests import BatchRequests
from ratchet.actors.buffer import BufferActor
from ratchet.actors.group_table import GroupTable
from ratchet.actors.in_flight import InFlight
from ratchet.actors.known_versions import KnownVersions
from ratchet.actors.prompt_source import PromptSource
from ratchet.actors.slots import Slots
from ratchet.actors.verdicts import Verdict, Verdicts
from ratchet.actors.weight_sync import WeightSync
from ratchet.transport.mailbox.limits import Limits


@mutant("a lease never ends (SkyRL#1173)", seed=84)
def lease_never_ends() -> Patches:
    return [(BufferActor, "_arm_leases", lambda self: None)]


@mutant("a failure gives no credit back (SkyRL#1173)", seed=13)
def credit_lost() -> Patches:
    whole = Slots.end

    def end(self: Any, ticket: int, *, finished: bool) -> None:
        free = self._num_free_again
        whole(self, ticket, finished=finished)
        if not finished:
            self._num_free_again = free

    return [(Slots, "end", end)]


@mutant("a late engine is never offered the live version", seed=13, slow=True)
def nobody_catches_up() -> Patches:
    async def sync(self: Any, engine: Any) -> None:
        return

    return [(WeightSync, "_sync", sync)]


@mutant("a finish that waits for a version is forgotten", seed=76)
def parked_finish_forgotten() -> Patches:
    answered = KnownVersions.answered

    def forget(self: Any, asked: Any, records: Any) -> list[Any]:
        answered(self, asked, records)
        return []

    return [(KnownVersions, "answered", forget)]


@mutant("a late finish is accepted", seed=24)
def late_finish_accepted() -> Patches:
    def find(self: Any, worker: str, incarnation: str, group_id: int, attempt: int) -> Any:
        return self._entries.get(group_id)

    return [(InFlight, "find", find)]


@mutant("hard prompts are recycled for ever (miles#2030)", seed=3)
def retried_for_ever() -> Patches:
    def unused(self: Any, entry: Any, reason: str, **_: Any) -> Verdict:
        return Verdict("retry", reason)

    return [(Verdicts, "_unused", unused)]


@mutant(
    "what a filter rejects goes to the handler",
    world=ordinary(buffer={"filters": ["zero_spread"], "unused": "retry"}),
)
def filtered_retried() -> Patches:
    judge = Verdicts.at_finish

    def at_finish(self: Any, entry: Any) -> Verdict:
        verdict = judge(self, entry)
        rejected = verdict.reason.startswith("filter:") and entry.retries == 0
        return Verdict("retry", verdict.reason) if rejected else verdict

    return [(Verdicts, "at_finish", at_finish)]


@mutant(
    "the reward of an aborted rollout is trained",
    world=ordinary(Sabotage(0.0, "abort", share=0.4, for_s=1e4), buffer={"unused": "mask"}),
)
def aborted_trained() -> Patches:
    return [(judging, "mask_aborted", lambda group: group)]


@mutant("capacity does not count the groups in flight", seed=3)
def capacity_of_the_queue_only() -> Patches:
    return [(OpenGroups, "num", property(lambda self: self.num_queued))]


@mutant("surplus finished groups are dropped without a word (slime#2238)", seed=23)
def surplus_dropped() -> Patches:
    batch = GroupTable.batch

    def and_forget(self: Any, entries: Any, step: int) -> Any:
        groups = batch(self, entries, step)
        for entry in self.queued():
            self.queue.take(entry.group_id)
        return groups

    return [(GroupTable, "batch", and_forget)]


@mutant("a prompt comes twice in an epoch (OpenRLHF#1322)", seed=8)
def prompt_twice() -> Patches:
    following = PromptSource.next

    def again(self: Any) -> Any:
        if self.position == 2 and not getattr(self, "_again", False):
            self._again = True
            self.position = 1
        return following(self)

    return [(PromptSource, "next", again)]


@mutant(
    "a lost reply trains a group twice (miles#1334)",
    world=ordinary(  # what asks again for one batch comes when the trainer waits for the next
        RepeatRequests(30.0, for_s=40.0, times=9),
        RepeatRequests(80.0, for_s=40.0, times=9),
        delays=Delays(step_s=1.0, token_s=2.0),
        limits=Limits(dead_s=100.0),
    ),
)
def any_batch_is_trained() -> Patches:
    return [(BatchRequests, "ready", lambda self, ready: self.end(ready))]


@mutant("a group is torn apart (NeMo-RL#3469)", seed=2)
def group_torn() -> Patches:
    batch = GroupTable.batch

    def torn(self: Any, entries: Any, step: int) -> Any:
        groups = batch(self, entries, step)
        return tuple(
            msgspec.structs.replace(group, rollouts=group.rollouts[:1]) for group in groups
        )

    return [(GroupTable, "batch", torn)]
