"""Checkpoints beside training: begun between two steps, written while the next ones are taken.

Consumes the weights in hand after each step; produces a checkpoint every `checkpoint.every_steps`
of them, and one at the end. The training task waits only while the state is copied; a child task
waits for the disk. One that is due while another is still being written is left out, and said so.
A checkpoint that fails is loud, and neither ends the run nor harms the ones before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from ratchet.actors.publisher import Publisher
from ratchet.actors.weight_sync import SpawnFunction
from ratchet.backends.training.base import TrainingBackend
from ratchet.messages import CheckpointWritten, StepTrained
from ratchet.observability.logs import Log
from ratchet.types import PolicyVersion, Term


class StartingPoint(NamedTuple):
    """The checkpoint that a trainer goes on from."""

    directory: Path
    version: PolicyVersion
    step: int
    done: StepTrained | None
    """what became of the batch of that step"""


class CheckpointStore(Protocol):
    """Where checkpoints are: whole, or not there."""

    async def begin_term(self, term: Term, start: StartingPoint | None, *, is_first: bool) -> None:
        """Write down where the trainer of a term begins, before it trains; `is_first` if nobody
        has published anything yet.

        Raises:
            ConfigError: if what earlier trainers have left is not here.
        """
        ...

    async def begin(self, version: PolicyVersion) -> Path:
        """Return an empty directory for the files of a checkpoint.

        Raises:
            OSError: if it cannot be made.
        """
        ...

    async def finish(
        self, version: PolicyVersion, step: int, term: Term, done: StepTrained | None
    ) -> None:
        """Make what was begun and written a checkpoint, and let old ones go.

        Raises:
            OSError: if it fails; the old ones stay.
            StaleTerm: if another trainer has taken over; the old ones stay.
        """
        ...

    async def abandon(self, version: PolicyVersion) -> None:
        """Remove what was begun."""
        ...


class Checkpointing:
    """Decides when, and never lets a failure out."""

    def __init__(  # noqa: PLR0913 - everything from outside is injected, by keyword
        self,
        store: CheckpointStore | None,
        *,
        every_steps: int,
        backend: TrainingBackend,
        publisher: Publisher,
        account: Callable[[], StepTrained | None],
        announce: Callable[[CheckpointWritten], None],
        spawn: SpawnFunction,
        now: Callable[[], float],
        log: Log,
    ) -> None:
        self.newest: int | None = None
        """step of the newest whole checkpoint of this trainer"""
        self.num_failed = 0
        self._store = store
        self._every_steps = every_steps
        self._backend = backend
        self._publisher = publisher
        self._account = account
        self._announce = announce
        self._spawn = spawn
        self._now = now
        self._log = log
        self._writing: asyncio.Task[None] | None = None

    async def begin_term(self, term: Term, start: StartingPoint | None, *, is_first: bool) -> None:
        """Write down where a term begins, if there are any checkpoints; as the store does."""
        if self._store is not None:
            await self._store.begin_term(term, start, is_first=is_first)

    async def stepped(self) -> None:
        """A step was applied; begin a checkpoint if one is due."""
        step = self._publisher.position.step
        if self._store is None or not self._every_steps or step % self._every_steps:
            return
        if self._writing is not None and not self._writing.done():
            self._log.warning("checkpoint_left_out", step=step, reason="another is being written")
            return
        await self._begin(self._store)

    async def last(self) -> None:
        """Training is over; return when its last step is in a checkpoint, if there are any."""
        await self._written()
        if self._store is None or not self._every_steps:
            return
        if self.newest != self._publisher.position.step:
            await self._begin(self._store)
            await self._written()

    async def _written(self) -> None:
        if self._writing is not None:
            await asyncio.wait([self._writing])

    async def _begin(self, store: CheckpointStore) -> None:
        version, step = self._publisher.position
        term, done, started = self._publisher.term, self._account(), self._now()
        try:
            directory = await store.begin(version)
            await self._backend.begin_save(directory)
        except OSError as error:
            await self._failed(store, version, step, error)
            return
        copied_s = self._now() - started
        self._writing = self._spawn(
            self._finish(store, (version, step, term, done), started, copied_s),
            name=f"checkpoint-{step}",
        )

    async def _finish(
        self,
        store: CheckpointStore,
        facts: tuple[PolicyVersion, int, Term, StepTrained | None],
        started: float,
        copied_s: float,
    ) -> None:
        version, step, term, _ = facts
        try:
            await self._backend.end_save()
            await store.finish(*facts)
        except OSError as error:
            await self._failed(store, version, step, error)
            return
        self.newest = step
        self._announce(CheckpointWritten(term, step))  # whole by now, and never before
        self._log.info(
            "checkpoint_written",
            version=version,
            step=step,
            copied_s=copied_s,
            seconds=self._now() - started,
        )

    async def _failed(
        self, store: CheckpointStore, version: PolicyVersion, step: int, error: OSError
    ) -> None:
        self.num_failed += 1
        self._log.error("checkpoint_failed", version=version, step=step, detail=str(error))
        await store.abandon(version)
