"""TrainerActor: batch, step, publish, and again.

Consumes `BatchReady` of the buffer; produces new weights, published through the registry and the
weight transport, one line of metrics a step, and at the end the model. One child task, `_train`,
reads top to bottom; it waits for

* the first engine, and the first version that one of them holds: each fails the run after
  `trainer.batch_timeout_s`;
* a batch: requested from the buffer for exactly the weights in hand; ends with `BatchReady`, or
  fails the run after `trainer.batch_timeout_s`;
* its step (`optimisation.py`), and the user's batch filter, the backend and a transfer with it;
* the engines' evaluations, before the first step and after the last; end by `eval.timeout_s`. For
  those beside training it does not wait (`evaluations.py`), but in the synchronous baseline.

What is past `max_staleness` for the weights that take the step is masked, or its group is sent back
untrained. A step that is not finite, or has nothing to train, is skipped and counted, and never
published; `trainer.max_bad_steps` of them in a row end the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import assert_never

from ratchet.actors.batch_requests import RepeatRequest
from ratchet.actors.checkpointing import CheckpointStore, StartingPoint
from ratchet.actors.evaluation import Evaluation
from ratchet.actors.judgement import BatchFilter
from ratchet.actors.publisher import WeightSnapshot
from ratchet.actors.role import BUFFER, RoleActor
from ratchet.actors.step_metrics import StepTimes, TrainerOutput
from ratchet.actors.system import System
from ratchet.actors.trainer_parts import trainer_parts
from ratchet.actors.weight_sync import SyncEngine
from ratchet.backends.training.base import TrainingBackend
from ratchet.config import Config
from ratchet.errors import RunFailed, StaleTerm
from ratchet.messages import (
    AcquireTerm,
    BatchReady,
    Down,
    RoleJoined,
    RoleLeft,
    RoleRegistered,
    RunEnded,
    StepTrained,
    StopTraining,
    TermAcquired,
    TrainerMessage,
    VersionUpdated,
)
from ratchet.status import EndStatus, Fact
from ratchet.transport.weights.base import WeightSender
from ratchet.types import Prompt, RoleInfo

_Inbox = TrainerMessage | Down | RoleRegistered | SyncEngine | RepeatRequest


class TrainerActor(RoleActor[_Inbox]):
    """The model in training and the sending end of weight sync."""

    def __init__(  # noqa: PLR0913 - everything from outside is injected, by keyword
        self,
        system: System,
        role: RoleInfo,
        *,
        config: Config,
        backend: TrainingBackend,
        sender: WeightSender,
        output: TrainerOutput,
        warm_start_prompts: Sequence[Prompt],
        snapshot: WeightSnapshot | None = None,
        batch_filter: BatchFilter | None = None,
        checkpoints: CheckpointStore | None = None,
        start: StartingPoint | None = None,
    ) -> None:
        super().__init__(system, role)
        self._config = config
        self._start = start
        self._backend = backend
        self._sender = sender
        self._output = output
        self._warm_start_prompts = warm_start_prompts
        parts = trainer_parts(
            self,
            config,
            backend=backend,
            sender=sender,
            output=output,
            snapshot=snapshot,
            batch_filter=batch_filter,
            checkpoints=checkpoints,
        )
        self._metrics = parts.metrics
        self._publisher = parts.publisher
        self._sync = parts.sync
        self._evaluations = parts.evaluations
        self._requests = parts.requests
        self._optimisation = parts.optimisation
        self._checkpointing = parts.checkpointing
        self._registered = asyncio.Event()
        self._stop_reason: str | None = None
        self._stepped_at: float | None = None

    def on_start(self) -> None:
        """Register, and start training in the background."""
        super().on_start()
        self._metrics.start()
        self.spawn(self._train(), name="train")

    async def release(self) -> None:
        """Free the model and the transfer group."""
        self._optimisation.close()
        await self._sender.close()
        await self._backend.close()

    async def _register(self) -> None:
        try:
            await super()._register()
        except RunFailed as error:  # it may have to be told from the trainer of another term
            raise RunFailed(f"{error} (term {self._publisher.term})") from None

    def on_failure(
        self,
        exception_type: type[BaseException] | None,
        exception_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the cause where the launcher and the user look first; not where another trainer
        goes on, who writes the summary in the end.
        """
        if not isinstance(exception_value, StaleTerm):
            self._summarise("failed", str(exception_value))

    def status(self) -> Mapping[str, Fact]:
        """Where training stands, who holds the weights, and what the next step waits for."""
        publisher = self._publisher
        return {
            "step": self._step,
            "version": publisher.version,
            "term": publisher.term,
            "live": publisher.live,
            "holders": len(publisher.holders),
            "engines": len(self._sync.engines),
            "waits_for_batch": self._requests.waiting,
            "publishing": self._sync.publishing,
            "last_step_s": None if self._stepped_at is None else self.now() - self._stepped_at,
            "bad_steps": self._optimisation.bad_steps,
            "checkpoint_step": self._checkpointing.newest,
            "evaluating": self._evaluations.running,
        }

    def receive(self, message: _Inbox) -> None:
        """Note what the training task waits for."""
        match message:
            case BatchReady():
                self._requests.ready(message)
            case StopTraining():
                self._stop_reason = message.reason
                self._sync.stop()
                self._requests.end()
            case Down():
                self.down(message)
            case RoleRegistered():
                for role in message.roles:
                    self._joined(role)
                    # one that a new registry knew before us: no `RoleJoined` of it follows
                    if self._registered.is_set() and role.kind == "rollout":
                        self.actor_ref.tell(SyncEngine(role))
                self._registered.set()
            case RoleJoined():
                self.learn(message.role)
                self._joined(message.role)
                if message.role.kind == "rollout":  # too late, perhaps, for what is under way
                    self.actor_ref.tell(SyncEngine(message.role))
            case RoleLeft():
                self.left(message.role)
                self._sync.left(message.role)
                self._evaluations.left(message.role)
            case RepeatRequest():
                self._requests.repeat()
            case SyncEngine():
                self._sync.sync(message.engine)
            case VersionUpdated():
                pass  # its own doing
            case RunEnded():
                self.run_ended(message)
            case _:
                assert_never(message)

    # --- the training task

    @property
    def _step(self) -> int:
        return self._optimisation.num_steps

    async def _train(self) -> None:
        await self._begin()
        before = await self._evaluations.whole()
        while self._step < self._config.trainer.num_steps and self._stop_reason is None:
            await self._take_step()
            if self._config.trainer.synchronous:  # strictly one after another
                await self._evaluations.ended()
        await self._evaluations.ended()  # training is over, and the last version needs an engine
        await self._sync.until_live("an engine to hold the last version")
        after = await self._evaluations.whole()
        await self._checkpointing.last()
        await self._output.model(self._backend)
        status: EndStatus = "finished" if self._stop_reason is None else "stopped"
        self._summarise(status, self._stop_reason, eval_before=before, eval_after=after)
        reason = self._stop_reason or f"{self._step} steps are trained"
        self.end_run(status, reason, self._publisher.term)

    async def _begin(self) -> None:
        """Load the weights that training starts from, and make them live."""
        start = self._start
        await self._optimisation.begin(start, self._warm_start_prompts)
        await self._registered.wait()
        request = AcquireTerm(self.name, self.role.incarnation)
        acquired: TermAcquired = await self.ask(self.registry, request)
        base, term = None, acquired.term
        await self._checkpointing.begin_term(term, start, is_first=not acquired.versions)
        self._output.begin(self._step)
        if start is not None:
            base, self._requests.done = start.version, start.done
        self._publisher.begin(term, acquired.versions, base)
        await self._sync.begin(self._step)

    async def _take_step(self) -> None:
        times = StepTimes(self.now)
        ready = await self._next_batch()
        if ready is None:
            return
        times.mark("wait_s")
        result = await self._optimisation.take(ready.batch.groups, times)
        if result.applied:
            self._sync.publish()
        term, step = self._publisher.term, ready.batch.step
        self._requests.account(StepTrained(term, step, result.trained, result.rejected))
        if result.applied:
            await self._checkpointing.stepped()
        self._stepped_at = self.now()
        if self._config.trainer.synchronous:
            await self._sync.transferred()
            times.mark("publish_s")
        if result.judged.groups:
            self._output.step(self._metrics.line(step, result, stats=ready.stats, times=times))
            self._optimisation.count(result, step)

    async def _next_batch(self) -> BatchReady | None:
        """Ask for a batch for exactly the weights in hand; None when the run is to stop."""
        what = f"the batch of step {self._step + 1}"
        batch = self._requests.next()
        within_s = self._config.trainer.batch_timeout_s
        return await self.wait_for(batch, on=BUFFER, what=what, within_s=within_s)

    def _joined(self, role: RoleInfo) -> None:
        if role.kind == "rollout":
            self._sync.joined(role)
        elif role.kind == "evaluator":
            self._evaluations.joined(role)
        elif role.name == BUFFER:
            self.buffer_joined()

    def say_again(self) -> None:
        """A new life of the buffer has not heard of our request."""
        self._requests.repeat()

    def _summarise(self, status: str, reason: str | None, **evaluations: Evaluation | None) -> None:
        self._output.summary(
            {
                "status": status,
                "reason": reason,
                "steps": self._step,
                **{name: e.line() if e else None for name, e in evaluations.items()},
            }
        )
