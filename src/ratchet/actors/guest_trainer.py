"""GuestTrainer: the trainer of a run whose steps are taken by somebody else's code.

Consumes batches like every trainer, and hands each to a `UserLoop`; produces versions from the
weights that this loop has made. All that is about batches, numbers, terms, transfers and late
engines is `TrainerActor`'s own. What differs is whom it waits for: before it asks for a batch, and
between a batch and its step, it waits for the user's loop. Both waits show in the table of waits,
and end with the loop's next call, or fail the trainer after the time that the loop may take.

A batch is asked for only when the loop wants one: whatever ends in between, no batch is left in
hand that nobody trains.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from ratchet.actors.batch_requests import RepeatRequest
from ratchet.actors.judgement import BatchFilter
from ratchet.actors.step_metrics import TrainerOutput
from ratchet.actors.system import System
from ratchet.actors.trainer import TrainerActor
from ratchet.actors.weight_sync import SyncEngine
from ratchet.backends.training.base import TrainingBackend
from ratchet.config import Config
from ratchet.errors import StaleTerm, WeightsMismatch
from ratchet.messages import (
    Ask,
    BatchReady,
    Down,
    RoleRegistered,
    TrainerMessage,
    VersionUpdated,
)
from ratchet.staleness import Position
from ratchet.transport.mailbox.base import Ref
from ratchet.transport.weights.base import WeightSender
from ratchet.types import RoleInfo

R = TypeVar("R")


class UserLoop(TrainingBackend, Protocol):
    """A loop outside the actors, as its trainer sees it: a backend that also says when."""

    async def wants_batch(self) -> bool:
        """Wait until the loop asks for a batch; False when it has taken its last step."""
        ...

    def batch_due(self, ready: BatchReady, position: Position) -> None:
        """The batch that `forward_backward` is about to get, and the weights that train it."""
        ...

    def stepped(self, position: Position) -> None:
        """A step is accounted for; the weights in hand have this number."""
        ...


class GuestTrainer(TrainerActor):
    """A `TrainerActor` for a `UserLoop`."""

    def __init__(
        self,
        system: System,
        role: RoleInfo,
        *,
        config: Config,
        loop: UserLoop,
        sender: WeightSender,
        output: TrainerOutput,
        batch_filter: BatchFilter | None = None,
    ) -> None:
        super().__init__(
            system,
            role,
            config=config,
            backend=loop,
            sender=sender,
            output=output,
            warm_start_prompts=(),
            batch_filter=batch_filter,
        )
        self._loop = loop

    def receive(
        self, message: TrainerMessage | Down | RoleRegistered | SyncEngine | RepeatRequest
    ) -> None:
        """Handle a message as every trainer does, but hear of a successor while the loop works."""
        if isinstance(message, VersionUpdated) and message.record.term > self._publisher.term > 0:
            record = message.record
            msg = (
                f"version {record.version} is of term {record.term}, and {self.name} has term"
                f" {self._publisher.term}: another trainer has taken over"
            )
            raise StaleTerm(msg)
        super().receive(message)

    async def ask(self, ref: Ref, message: Ask[R], *, timeout: float | None = None) -> R:
        """Ask, and do not go on with a model that no engine can load.

        Raises:
            ValueError: an engine finds other weights than its own in the first version.
        """
        try:
            return await super().ask(ref, message, timeout=timeout)
        except WeightsMismatch as error:
            if self._step or self._publisher.live is not None:
                raise
            msg = f"the model in training is not the model of the engines: {error}"
            raise ValueError(msg) from error

    async def _next_batch(self) -> BatchReady | None:
        wanted = await self._loop.wants_batch()
        if self._stop_reason is not None:
            return None
        if not wanted:  # the run has as many steps as were taken
            trainer = self._config.trainer.model_copy(update={"num_steps": self._step})
            self._config = self._config.model_copy(update={"trainer": trainer})
            return None
        ready = await super()._next_batch()
        if ready is not None:
            self._loop.batch_due(ready, self._publisher.position)
        return ready

    async def _take_step(self) -> None:
        await super()._take_step()
        self._loop.stepped(self._publisher.position)
