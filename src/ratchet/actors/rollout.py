"""RolloutActor: one engine that generates, scores, and takes new weights while it does.

Consumes `PromptsClaimed` of the buffer, `LoadWeights` and `EvaluatePolicy` of the trainer. Produces
`GroupFinished` or `GroupFailed` for every group that it was handed, and `WeightsLoaded` once the
engine holds what the trainer sent. Each group is a child task, many at once; what it waits for is
the engine, and its deadline (`rollout.group_timeout_s`) ends that wait. The engine stands still
between two tokens while weights are written; requests stay in flight and go on, so a completion may
carry two versions.

It asks for prompts by credit: as many groups as it has slots for, and more as groups end, or single
samples (`rollout.submission`). Credit goes out only while the engine holds a version: before the
first load, and after a failed one, it serves nothing and takes nothing. A worker whose groups all
fail claims ever more slowly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import assert_never

from ratchet.actors.evaluation_share import EvaluationShares
from ratchet.actors.generation import Generator, GroupFailure, Scorer
from ratchet.actors.role import BUFFER, RoleActor
from ratchet.actors.slots import Slots, Stopwatch
from ratchet.actors.system import System
from ratchet.actors.weight_loads import WeightLoads
from ratchet.backends.rollout.base import RolloutEngine
from ratchet.config import Config
from ratchet.messages import (
    AbortLoad,
    ClaimPrompts,
    Down,
    EvaluatePolicy,
    GroupFailed,
    GroupFinished,
    LoadWeights,
    Message,
    PolicyEvaluated,
    PromptsClaimed,
    RoleJoined,
    RoleLeft,
    RoleRegistered,
    RolloutMessage,
    RunEnded,
    VersionUpdated,
    WeightsLoaded,
)
from ratchet.status import Fact
from ratchet.transport.weights.base import WeightReceiver
from ratchet.types import Assignment, Prompt, RoleInfo, RolloutGroup, RolloutStats


class SampleEnded(Message, frozen=True):
    """To itself: the engine is done with one sample of a group."""

    ticket: int


class GroupEnded(Message, frozen=True):
    """To itself: a group's task is done, for better or worse."""

    ticket: int
    outcome: RolloutGroup | GroupFailure


class EngineReady(Message, frozen=True):
    """To itself: the engine holds another version, or has time again: it may claim."""


class Rested(Message, frozen=True):
    """To itself: after failures in a row, another group may be tried."""


class RepeatClaim(Message, frozen=True):
    """To itself: the last claim may have been lost, with a link."""


_Inbox = (
    RolloutMessage
    | Down
    | RoleRegistered
    | SampleEnded
    | GroupEnded
    | EngineReady
    | Rested
    | RepeatClaim
)


class RolloutActor(RoleActor[_Inbox]):
    """Generation, scoring and weight loading of one engine."""

    def __init__(
        self,
        system: System,
        role: RoleInfo,
        *,
        config: Config,
        engine: RolloutEngine,
        receiver: WeightReceiver,
        scorer: Scorer,
        eval_prompts: Sequence[Prompt],
    ) -> None:
        super().__init__(system, role)
        self._config = config
        self._engine = engine
        self._scorer = scorer
        self._generator = Generator(config, engine, scorer)
        self._loads = WeightLoads(
            role,
            engine,
            receiver,
            pause_mode=config.weights.pause_mode,
            log=self.log,
            spawn=lambda coro, name: self.spawn(coro, name=name),
            loaded=lambda: self.actor_ref.tell(EngineReady()),
        )
        self._evaluations = EvaluationShares(
            self._generator, eval_prompts, timeout_s=config.eval.timeout_s, log=self.log
        )
        self._slots = Slots(
            groups=config.groups_per_worker,
            group_size=config.rollout.group_size,
            per_sample=config.rollout.submission == "sample",
        )
        self._rests = False
        self._started = 0.0
        self._starved = Stopwatch(self.now)

    def on_start(self) -> None:
        """Start the engine, then register: a registered rollout can take weights at once."""
        self._started = self.now()
        self.spawn(self._start(), name="start-engine")

    async def release(self) -> None:
        """End the engine and the scoring, and leave the transfer group."""
        self._scorer.close()
        await self._loads.close()
        await self._engine.close()

    def status(self) -> Mapping[str, Fact]:
        """What it holds and does; `busy_share` is of its whole life."""
        stats = self._stats()
        return {
            "version": stats.version,
            "loading": self._loads.loading,
            "in_flight_groups": stats.in_flight_groups,
            "finished_groups": stats.finished_groups,
            "failed_groups": stats.failed_groups,
            "busy_share": stats.busy_s / stats.uptime_s if stats.uptime_s > 0 else 0.0,
            "paused_s": stats.paused_s,
        }

    async def _start(self) -> None:
        await self._engine.start()
        # its end is ours: what it had in hand is issued again, and our next life has a new one
        self.spawn(self._engine.watch(), name="watch-engine")
        await self._register()
        self.actor_ref.tell(RepeatClaim())

    def receive(self, message: _Inbox) -> asyncio.Task[WeightsLoaded | PolicyEvaluated] | None:
        """Handle one message; loads and evaluations reply when they are done."""
        self._starved.tick(self._may_claim and self._slots.has_credit)
        match message:
            case PromptsClaimed():
                self._claimed(message)
            case LoadWeights():
                load = self._loads.begin(message)
                self._evaluations.supersede(message.manifest.version)
                return load
            case AbortLoad():
                self._loads.abort(message)
            case EvaluatePolicy():
                return self.spawn(self._evaluate(message), name=f"evaluate-{message.version}")
            case EngineReady():
                self._claim()  # a total: safe to repeat
            case Rested():
                self._rests = False
                self._claim()
            case RepeatClaim():
                self._repeat_claim()
            case SampleEnded():
                if self._slots.end_sample(message.ticket):
                    self._claim()
            case GroupEnded():
                self._end(message.ticket, message.outcome)
            case RoleJoined():
                self.learn(message.role)
                if message.role.name == BUFFER:
                    self.buffer_joined()
            case RoleRegistered():
                self._claim()
            case RoleLeft():
                self.left(message.role)
            case Down():
                self.down(message)
            case RunEnded():
                self.run_ended(message)
            case VersionUpdated():
                pass
            case _:
                assert_never(message)
        return None

    # --- groups

    @property
    def _may_claim(self) -> bool:
        """If not, `EngineReady` follows a load and an evaluation, and `Rested` the rest."""
        may = not self._rests and not self._evaluations.running and self.role.kind != "evaluator"
        return may and self._engine.version is not None

    def say_again(self) -> None:
        """A new life of the buffer knows nothing of our credit."""
        self._claim()

    def _claim(self) -> None:
        version, buffer = self._engine.version, self.life_of(BUFFER)
        if version is None or not buffer or not self._may_claim:
            return  # without a buffer, its `RoleJoined` follows
        self._slots.count_for(buffer)
        credit = self._slots.credit
        message = ClaimPrompts(self.name, self.role.incarnation, credit, version, buffer)
        self.system.ref(BUFFER).tell(message)

    def _repeat_claim(self) -> None:
        self.after(self._config.buffer.lease_s / 2, RepeatClaim())
        if self._slots.has_credit:
            self._claim()

    def _claimed(self, message: PromptsClaimed) -> None:
        if message.incarnation != self.role.incarnation:
            self.log.warning("claim_of_another_life", meant_for=message.incarnation)
            return
        if message.buffer != self.life_of(BUFFER):  # whoever follows it issues these again
            self.log.warning("claim_from_another_life", buffer=message.buffer)
            return
        for assignment in message.assignments:
            ticket = self._slots.begin()
            self.spawn(self._run_group(ticket, assignment), name=f"group-{assignment.group_id}")

    async def _run_group(self, ticket: int, assignment: Assignment) -> None:
        tell = self.actor_ref.tell
        sample_ended = partial(tell, SampleEnded(ticket)) if self._slots.per_sample else None
        outcome = await self._generator.run_group(assignment, sample_ended)
        tell(GroupEnded(ticket, outcome))

    def _end(self, ticket: int, outcome: RolloutGroup | GroupFailure) -> None:
        self._slots.end(ticket, finished=isinstance(outcome, RolloutGroup))
        report: GroupFinished | GroupFailed
        if isinstance(outcome, RolloutGroup):
            report = GroupFinished(self.name, self.role.incarnation, outcome, self._stats())
        else:
            report = GroupFailed(
                self.name,
                self.role.incarnation,
                outcome.group_id,
                outcome.attempt,
                outcome.reason,
                outcome.detail,
                self._stats(),
            )
        self.system.ref(BUFFER).tell(report)
        rest_s = self._slots.rest_s
        if rest_s is None:
            self._claim()
        elif not self._rests:
            self._rests = True
            self.after(rest_s, Rested())

    def _stats(self) -> RolloutStats:
        engine = self._engine.stats()
        return RolloutStats(
            worker=self.name,
            incarnation=self.role.incarnation,
            uptime_s=self.now() - self._started,
            busy_s=engine.busy_s,
            paused_s=engine.paused_s,
            generated_tokens=engine.generated_tokens,
            finished_groups=self._slots.num_finished,
            failed_groups=self._slots.num_failed,
            in_flight_groups=self._slots.num_in_flight,
            version=self._engine.version,
            starved_s=self._starved.seconds,
        )

    # --- evaluation

    async def _evaluate(self, message: EvaluatePolicy) -> PolicyEvaluated:
        try:
            return await self._evaluations.run(message, self._engine.version)
        finally:
            if self.actor_ref.is_alive():  # and not ended because the worker ends
                self.actor_ref.tell(EngineReady())
