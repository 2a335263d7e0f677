"""A real buffer, a model of it, and everything that others may tell both."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.helpers.buffer_model import BufferModel
from tests.helpers.buffer_others import Handed, Trainer, Worker, one_of
from tests.helpers.config import small_config
from tests.helpers.driven_buffer import LIFE, DrivenBuffer, assignments
from tests.helpers.samples import sample

from ratchet.messages import (
    BatchReady,
    ClaimPrompts,
    GroupFailed,
    GroupFinished,
    LineageDescribed,
    Message,
    RequestBatch,
    RoleLeft,
    RoleRegistered,
    StepTrained,
    VersionUpdated,
)
from ratchet.types import RoleInfo, RolloutGroup, RolloutStats, VersionRecord

EVENTS = (
    *["finish"] * 24,
    *["train"] * 16,
    *["claim", "publish", "request"] * 6,
    *["fail", "a_version_is_told", "the_registry_answers", "time_passes"] * 3,
    *["an_older_claim_comes", "a_worker_dies", "a_death_is_noticed"],
    *["an_account_comes_again", "a_trainer_takes_over", "a_zombie_speaks"],
)
"""as often as they are named"""
MANY = st.integers(0, 119)
"""picks one of as many as there are"""
WORKERS = ("rollout-0", "rollout-1")
LEASE_S = 10.0


class Buffer(RuleBasedStateMachine):
    """Each event is something that a worker, a trainer, the registry or the time does."""

    loop: asyncio.AbstractEventLoop

    @initialize(
        batch_groups=st.integers(1, 3),
        capacity_factor=st.sampled_from([1.0, 1.5, 2.0, 3.0]),
        bytes_of=st.sampled_from([None, None, 1.0, 2.5]),
        max_staleness=st.integers(0, 2),
        admission=st.sampled_from(["capacity", "capacity", "bounded"]),
        filters=st.sampled_from([[], ["zero_spread"], ["any_aborted", "zero_spread"]]),
        unused=st.sampled_from(["drop", "retry", "mask"]),
        max_retries=st.integers(0, 2),
        max_reissues=st.integers(0, 2),
        num_prompts=st.integers(1, 7),
    )
    def begin(self, bytes_of: float | None, num_prompts: int, **buffer: Any) -> None:
        if bytes_of is not None:
            buffer["max_bytes"] = int(bytes_of * buffer["batch_groups"] * 2 * 22)
        self.config = small_config(
            buffer=buffer | {"lease_s": LEASE_S},
            rollout={"max_tokens": 5, "group_size": 2, "group_timeout_s": LEASE_S},
        )
        self.records = [VersionRecord(0, 1, 0, None, "live", "d")]
        self.buffer = DrivenBuffer(self.config, num_prompts, self.loop)
        self.model = BufferModel(self.config, self.records[0])
        self.workers = [Worker(name) for name in WORKERS]
        self.trainer = Trainer(1)
        self.zombie: Trainer | None = None
        self.claims: list[ClaimPrompts] = []
        self.handed: list[Handed] = []
        self.unburied: list[RoleInfo] = []
        self.tell(RoleRegistered((), tuple(self.records)))
        for which in range(len(WORKERS)):
            self.claim(which, kind=2, more=1)

    def tell(self, message: Any) -> None:
        self.buffer.receive(message)
        self.followed(message)

    def followed(self, message: object) -> None:
        told = self.buffer.take_told()
        self.model.heard(message, told, self.buffer.clock)
        for worker, incarnation, assignment in assignments(told):
            version = self.model.groups[assignment.group_id].base
            self.handed.append(Handed(worker, incarnation, assignment, version))
        self.said: list[Message] = [said for _, said in told]
        self.model.check(self.buffer)

    # one rule, not one for each of these: hypothesis would leave some of several out of each run,
    # and a buffer without finishes, or without requests, does nothing
    @rule(what=st.sampled_from(EVENTS), which=MANY, kind=MANY, more=MANY)
    def happens(self, what: str, which: int, kind: int, more: int) -> None:
        getattr(self, what)(which, kind, more)

    # --- workers

    def claim(self, which: int, kind: int, more: int) -> None:
        me = self.workers[which % len(WORKERS)]
        me.credit += 1 + kind % 4
        if more % 3:
            me.version = self._newer(me.version, which)
        life = LIFE if more % 11 else "another life"  # which had been claimed from before
        self.claims.append(ClaimPrompts(me.name, me.incarnation, me.credit, me.version, life))
        if more % 5:  # else it is lost
            self.tell(self.claims[-1])

    def an_older_claim_comes(self, which: int, kind: int, more: int) -> None:
        lives = {worker.incarnation for worker in self.workers}
        claim = one_of(self.claims, which)
        if claim is not None and (
            claim.incarnation in lives or (claim.worker, claim.incarnation) in self.model.closed
        ):
            self.tell(claim)

    def a_worker_dies(self, which: int, kind: int, more: int) -> None:
        me = self.workers[which % 2]
        self.unburied.append(RoleInfo("rollout", me.name, me.incarnation))
        self.workers[which % 2] = Worker(me.name, me.life + 1, version=me.version)
        if kind % 2:
            self.a_death_is_noticed(which, kind, more)

    def a_death_is_noticed(self, which: int, kind: int, more: int) -> None:
        if self.unburied:
            self.tell(RoleLeft(self.unburied.pop(), "killed"))

    def finish(self, which: int, kind: int, more: int) -> None:
        handed = self._handed(which)
        if handed is None:
            return
        first = self._newer(handed.version, kind)
        last = self._newer(first, kind // 8)
        ends: Any = {3: "abort", 7: "error"}.get(more % 12, "stop")
        rollouts = (
            sample(0.0, *[first] * (1 + which % 3)),
            sample(float(kind % 8 > 0), first, last, finish=ends),
        )
        given = handed.assignment
        group = RolloutGroup(
            given.group_id, given.attempt, given.prompt.prompt_id, given.epoch, rollouts
        )
        stats = RolloutStats(handed.worker, handed.incarnation)
        self.tell(GroupFinished(handed.worker, handed.incarnation, group, stats))
        self.claim(WORKERS.index(handed.worker), 0, more)

    def fail(self, which: int, kind: int, more: int) -> None:
        handed = self._handed(which)
        if handed is None:
            return
        given, who = handed.assignment, (handed.worker, handed.incarnation)
        group = given.group_id, given.attempt
        self.tell(GroupFailed(*who, *group, "reward", "why", RolloutStats(*who)))

    def _handed(self, which: int) -> Handed | None:
        """Mostly one that is in flight; any that was, too."""
        flight = [
            each
            for each in self.handed
            if (group := self.model.groups[each.assignment.group_id]).place == "flight"
            and group.attempt == each.assignment.attempt
        ]
        return one_of(flight if flight and which % 4 else self.handed, which // 4)

    def _newer(self, version: int, which: int) -> int:
        """One of the versions that an engine may hold after this one: not before it, not burnt."""
        later = [r.version for r in self.records if r.version >= version and r.state == "live"]
        return one_of(later, which) or version

    # --- the registry and the time

    def publish(self, which: int, kind: int, more: int) -> None:
        if not self.trainer.waits:
            self._reserve(self.trainer, self.trainer.version, kind)

    def a_version_is_told(self, which: int, kind: int, more: int) -> None:
        record = one_of([r for r in self.records if r.state == "live"], which)
        self.tell(VersionUpdated(record))

    def _reserve(self, trainer: Trainer, parent: int, kind: int) -> None:
        version = len(self.records)
        state: Any = "live" if kind % 5 else "burnt"
        record = VersionRecord(version, trainer.term, trainer.step, parent, state, "d")
        self.records.append(record)
        trainer.version = version
        if state == "live" and kind % 3:
            self.tell(VersionUpdated(record))

    def the_registry_answers(self, which: int, kind: int, more: int) -> None:
        question = one_of(self.buffer.questions, which)
        if question is not None:
            self.buffer.questions.remove(question)
            records = tuple(self.records[version] for version in question.message.versions)
            question.answer(records)
            self.followed(LineageDescribed(records))

    def time_passes(self, which: int, kind: int, more: int) -> None:
        until = self.buffer.clock + 1 + which % 12
        while (message := self.buffer.fire(until)) is not None:
            self.followed(message)
        flight = [g for g in self.model.groups.values() if g.place == "flight"]
        assert all(group.lease_end > until for group in flight), "a lease has ended, and is kept"

    # --- trainers

    def request(self, which: int, kind: int, more: int) -> None:
        self._request(self.trainer, is_lost=kind % 5 == 0)

    def _request(self, me: Trainer, *, is_lost: bool) -> None:
        if me.batch is not None:
            return
        me.waits = True
        self.tell(RequestBatch("trainer-0", me.term, me.version, me.step, me.done, LIFE))
        if not is_lost:
            self._take(me)

    def _take(self, me: Trainer) -> None:
        due = me.term, me.step + 1
        for said in self.said:
            if isinstance(said, BatchReady) and (said.term, said.batch.step) == due:
                me.batch, me.waits = said, False

    def train(self, which: int, kind: int, more: int) -> None:
        self._request(self.trainer, is_lost=False)
        self._train(self.trainer, which, kind, is_lost=more % 4 == 0)

    def _train(self, me: Trainer, which: int, kind: int, *, is_lost: bool) -> None:
        if me.batch is None:
            return
        ids = [group.group_id for group in me.batch.batch.groups]
        cut = {3: 1, 5: len(ids)}.get(which % 8, 0)
        reason = ("stale", "non_finite", "filter:batch")[kind % 3]
        rejected = dict.fromkeys(ids[:cut], reason)
        attempts = {group.group_id: group.attempt for group in me.batch.batch.groups}
        me.done = StepTrained(me.term, me.batch.batch.step, tuple(ids[cut:]), rejected, attempts)
        me.batch = None
        me.step += cut < len(ids)
        if not is_lost:
            self.tell(me.done)

    def an_account_comes_again(self, which: int, kind: int, more: int) -> None:
        if self.trainer.done is not None:
            self.tell(self.trainer.done)

    def a_trainer_takes_over(self, which: int, kind: int, more: int) -> None:
        self.zombie = replace(self.trainer)
        base = self.records[-1 - which % len(self.records)]
        self.trainer = Trainer(self.trainer.term + 1, step=base.step)
        self.model.unbroken = False
        self._reserve(self.trainer, base.version, kind)

    def a_zombie_speaks(self, which: int, kind: int, more: int) -> None:
        if self.zombie is not None and self.zombie.batch is None:
            self._request(self.zombie, is_lost=False)
        elif self.zombie is not None:
            self._train(self.zombie, which, kind, is_lost=False)

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            self.buffer.end()
