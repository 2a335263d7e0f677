"""RolloutActor: one engine that generates, scores, and takes new weights while it does.

Consumes `PromptsClaimed` of the buffer, `LoadWeights` and `EvaluatePolicy` of the trainer. Produces
`GroupFinished` or `GroupFailed` for every group that it was handed, and `WeightsLoaded` once the
engine holds what the trainer sent. Each group is a child task, many at once; what it waits for is
the engine, and its deadline (`rollout.group_timeout_s`) ends that wait. The engine stands still
between two tokens while weights are written; requests stay in flight and go on, so a completion may
carry two versions.

It asks for prompts by credit: as many groups as it holds slots, and one more for each group that
ends. Credit goes out only while the engine holds a version: before the first load, and after a
failed one, it serves nothing and takes nothing. A worker whose groups all fail claims ever more
slowly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final, assert_never

from ratchet.actors.generation import Generator, GroupFailure, Scorer
from ratchet.actors.role import BUFFER, RoleActor
from ratchet.actors.system import System
from ratchet.backends.rollout.base import RolloutEngine
from ratchet.config import Config
from ratchet.errors import (
    GenerationFailed,
    RewardFailed,
    StaleTerm,
    TransferFailed,
    VersionError,
    WeightsMismatch,
)
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
from ratchet.types import (
    Assignment,
    PolicyVersion,
    Prompt,
    RoleInfo,
    RolloutGroup,
    RolloutStats,
    Term,
)

_BACKOFF_S: Final = 0.05
_MOST_BACKOFF_S: Final = 10.0


class GroupEnded(Message, frozen=True):
    """To itself: a group's task is done, for better or worse."""

    outcome: RolloutGroup | GroupFailure


class EngineReady(Message, frozen=True):
    """To itself: the engine holds a version after it had none or another one."""


class Rested(Message, frozen=True):
    """To itself: after failures in a row, another group may be tried."""


class RepeatClaim(Message, frozen=True):
    """To itself: the last claim may have been lost, with a link."""


_Inbox = RepeatClaim | RolloutMessage | Down | RoleRegistered | GroupEnded | EngineReady | Rested


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
        self._receiver = receiver
        self._eval_prompts = eval_prompts
        self._term: Term = 0
        self._offered: PolicyVersion = -1  # the newest version that was offered, loaded or not
        self._load: asyncio.Task[WeightsLoaded] | None = None
        self._slots = config.groups_per_worker
        self._finished = 0
        self._failed = 0
        self._failures_in_a_row = 0
        self._rests = False
        self._in_flight = 0
        self._started = 0.0

    def on_start(self) -> None:
        """Start the engine, then register: a registered rollout can take weights at once."""
        self._started = self.now()
        self.spawn(self._start(), name="start-engine")

    async def release(self) -> None:
        """End the engine and the scoring, and leave the transfer group."""
        self._scorer.close()
        self._receiver.abort("the rollout worker ends")
        await self._receiver.close()
        await self._engine.close()

    def status(self) -> Mapping[str, Fact]:
        """What it holds and does; `busy_share` is of its whole life."""
        stats = self._stats()
        load = self._load
        return {
            "version": stats.version,
            "loading": self._offered if load is not None and not load.done() else None,
            "in_flight_groups": stats.in_flight_groups,
            "finished_groups": stats.finished_groups,
            "failed_groups": stats.failed_groups,
            "busy_share": stats.busy_s / stats.uptime_s if stats.uptime_s > 0 else 0.0,
            "paused_s": stats.paused_s,
        }

    async def _start(self) -> None:
        await self._engine.start()
        await self._register()
        self.actor_ref.tell(RepeatClaim())

    def receive(self, message: _Inbox) -> asyncio.Task[WeightsLoaded | PolicyEvaluated] | None:
        """Handle one message; loads and evaluations reply when they are done."""
        match message:
            case PromptsClaimed():
                self._claimed(message)
            case LoadWeights():
                return self._load_weights(message)
            case AbortLoad():
                if (message.term, message.version) == (self._term, self._offered):
                    self._receiver.abort(message.reason)
            case EvaluatePolicy():
                return self.spawn(self._evaluate(message), name=f"evaluate-{message.version}")
            case EngineReady():
                self._claim()  # a total: safe to repeat
            case Rested():
                self._rests = False
                self._claim()
            case RepeatClaim():
                self._repeat_claim()
            case GroupEnded():
                self._end(message.outcome)
            case RoleJoined():
                self.learn(message.role)
                if message.role.name == BUFFER:
                    self._claim()  # a new life of the buffer knows nothing of our credit
            case Down():
                self.registry_lost(message)
            case RunEnded():
                self.run_ended(message)
            case RoleRegistered() | RoleLeft() | VersionUpdated():
                pass
            case _:
                assert_never(message)
        return None

    # --- groups

    def _claim(self) -> None:
        if self._engine.version is None or self._rests:
            return  # `EngineReady` follows the next load, `Rested` the rest
        credit = self._slots + self._finished + self._failed
        message = ClaimPrompts(self.name, self.role.incarnation, credit)
        self.system.ref(BUFFER).tell(message)

    def _repeat_claim(self) -> None:
        self.after(self._config.buffer.lease_s / 2, RepeatClaim())
        if self._in_flight < self._slots:
            self._claim()

    def _claimed(self, message: PromptsClaimed) -> None:
        if message.incarnation != self.role.incarnation:
            self.log.warning("claim_of_another_life", meant_for=message.incarnation)
            return
        for assignment in message.assignments:
            self._in_flight += 1
            self.spawn(self._run_group(assignment), name=f"group-{assignment.group_id}")

    async def _run_group(self, assignment: Assignment) -> None:
        self.actor_ref.tell(GroupEnded(await self._generator.run_group(assignment)))

    def _end(self, outcome: RolloutGroup | GroupFailure) -> None:
        self._in_flight -= 1
        incarnation = self.role.incarnation
        buffer = self.system.ref(BUFFER)
        if isinstance(outcome, RolloutGroup):
            self._finished += 1
            self._failures_in_a_row = 0
            buffer.tell(GroupFinished(self.name, incarnation, outcome, self._stats()))
        else:
            self._failed += 1
            self._failures_in_a_row += 1
            buffer.tell(
                GroupFailed(
                    self.name,
                    incarnation,
                    outcome.group_id,
                    outcome.attempt,
                    outcome.reason,
                    outcome.detail,
                    self._stats(),
                )
            )
        if self._failures_in_a_row <= self._slots:
            self._claim()
        elif not self._rests:  # what fails at once must not eat the data as fast as it can
            self._rests = True
            again = self._failures_in_a_row - self._slots
            self.after(min(_MOST_BACKOFF_S, _BACKOFF_S * 2.0 ** min(again, 16)), Rested())

    def _stats(self) -> RolloutStats:
        engine = self._engine.stats()
        return RolloutStats(
            worker=self.name,
            incarnation=self.role.incarnation,
            uptime_s=self.now() - self._started,
            busy_s=engine.busy_s,
            paused_s=engine.paused_s,
            generated_tokens=engine.generated_tokens,
            finished_groups=self._finished,
            failed_groups=self._failed,
            in_flight_groups=self._in_flight,
            version=self._engine.version,
        )

    # --- weights

    def _load_weights(self, message: LoadWeights) -> asyncio.Task[WeightsLoaded]:
        term = message.manifest.term
        if message.incarnation != self.role.incarnation:
            msg = (
                f"{self.name} {self.role.incarnation} takes no weights that are meant for its life"
                f" {message.incarnation}"
            )
            raise VersionError(msg)
        if term < self._term:
            msg = f"{self.name} refuses term {term}: it has seen term {self._term}"
            raise StaleTerm(msg)
        self._term = term
        version = message.manifest.version
        if version < self._offered:  # also after a failed load, when the engine holds none
            msg = (
                f"{self.name} was offered version {self._offered}: it does not go back to {version}"
            )
            raise VersionError(msg)
        self._offered = version
        previous, self._load = self._load, None
        self._load = self.spawn(self._receive(message, previous), name=f"load-{version}")
        return self._load

    async def _receive(
        self, message: LoadWeights, previous: asyncio.Task[WeightsLoaded] | None
    ) -> WeightsLoaded:
        version = message.manifest.version
        if previous is not None and not previous.done():
            self._receiver.abort(f"superseded by version {version}")
            await asyncio.wait([previous])
        if self._load is not asyncio.current_task():
            msg = f"version {version} was superseded before its transfer began"
            raise TransferFailed(msg)
        try:
            report = await self._receiver.receive(
                message.manifest, message.route, self._engine, self._config.weights.pause_mode
            )
        except (TransferFailed, WeightsMismatch) as error:
            self.log.warning("load_failed", version=version, detail=str(error))
            raise
        self.log.info(
            "weights_loaded",
            version=version,
            digest=report.digest,
            move_s=report.move_s,
            load_s=report.load_s,
            paused_s=report.paused_s,
        )
        self.actor_ref.tell(EngineReady())
        return WeightsLoaded(
            self.name, version, report.digest, report.move_s, report.load_s, report.paused_s
        )

    # --- evaluation

    async def _evaluate(self, message: EvaluatePolicy) -> PolicyEvaluated:
        if self._engine.version != message.version:
            msg = f"{self.name} holds version {self._engine.version}, not {message.version}"
            raise VersionError(msg)
        prompts = self._eval_prompts[message.first : message.first + message.count]
        rewards = await asyncio.gather(
            *(self._evaluate_prompt(prompt, message) for prompt in prompts)
        )
        return PolicyEvaluated(message.version, tuple(rewards))

    async def _evaluate_prompt(self, prompt: Prompt, message: EvaluatePolicy) -> float | None:
        try:
            return await self._generator.evaluate(prompt, message)
        except (GenerationFailed, RewardFailed) as error:
            self.log.warning("evaluation_failed", prompt=prompt.prompt_id, detail=str(error))
            return None
