"""The checkpoints of a run for its trainer: the files of `storage.checkpoints`, off the event loop.

Consumes begun and finished checkpoints, produces directories; waits for the disk, on a thread.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from ratchet.actors.checkpointing import StartingPoint
from ratchet.config import Config
from ratchet.errors import ConfigError
from ratchet.messages import StepTrained
from ratchet.observability.logs import Log
from ratchet.observability.rundir import RunDirectory
from ratchet.storage.checkpoint import CheckpointFacts
from ratchet.storage.checkpoints import Checkpoints
from ratchet.storage.starts import Start, Starts
from ratchet.types import PolicyVersion, Term


class RunCheckpoints:
    """Implements `CheckpointStore`."""

    def __init__(self, run: RunDirectory, run_id: str, config: Config, log: Log) -> None:
        self._run = run
        self._log = log
        self._checkpoints = Checkpoints(
            run.checkpoints, keep=config.checkpoint.keep, not_removed=self._not_removed
        )
        self._run_id = run_id
        self._data = config.task.fingerprint or ""

    def start(self, step: int | None = None) -> StartingPoint | None:
        """Return the newest checkpoint, or that of a step; None if there is none to go on from.

        Raises:
            UserError: if there is no such checkpoint, or it is damaged.
        """
        if step is None and not self._checkpoints.whole():
            return None
        found = self._checkpoints.find(step)
        facts = found.facts
        return StartingPoint(found.path, facts.version, facts.step, facts.done)

    async def begin_term(self, term: Term, start: StartingPoint | None, *, is_first: bool) -> None:
        """Write down where the trainer of a term begins; from here on older ones are fenced.

        Raises:
            ConfigError: if other trainers of the run have had their files elsewhere.
            OSError: if it cannot be written, or the checkpoint has just been removed, by a trainer
                that has lived on; there is a newer one then.
        """
        await asyncio.to_thread(self._begin_term, term, start, is_first)

    def _begin_term(self, term: Term, start: StartingPoint | None, is_first: bool) -> None:
        if not is_first and not self._checkpoints.starts.newest():
            msg = (
                f"the run has been trained already, and {self._run.root} has nothing of that; give"
                " as --dir the directory of its trainer, on a file system that both nodes share"
            )
            raise ConfigError(msg)
        version, step = (None, 0) if start is None else (start.version, start.step)
        self._checkpoints.starts.record(Start(term, version, step))
        if start is not None and not start.directory.exists():
            self._checkpoints.starts.withdraw(term)
            msg = f"{start.directory} was removed by another trainer meanwhile"
            raise FileNotFoundError(msg)

    async def begin(self, version: PolicyVersion) -> Path:
        """Return an empty directory for the files of a checkpoint."""
        return await asyncio.to_thread(self._checkpoints.begin, version)

    async def finish(
        self, version: PolicyVersion, step: int, term: Term, done: StepTrained | None
    ) -> None:
        """Make what was begun and written a checkpoint, and let old ones go."""
        facts = CheckpointFacts(self._run_id, version, step, term, self._data, done, time.time())
        await asyncio.to_thread(self._checkpoints.finish, facts)

    def _not_removed(self, path: Path, error: Exception) -> None:
        self._log.warning("checkpoint_not_removed", path=str(path), detail=str(error))

    async def abandon(self, version: PolicyVersion) -> None:
        """Remove what was begun."""
        await asyncio.to_thread(self._checkpoints.abandon, version)


class ChosenStart:
    """The checkpoint that a run was told to go on from: for the first trainer that begins. A later
    life of it goes on from the newest checkpoint, which it may have written itself.

    Args:
        run: whose checkpoints these are.
        step: of the checkpoint; None for the newest.
    """

    def __init__(self, run: RunDirectory, step: int | None) -> None:
        self._starts = Starts(run.checkpoints)
        self._step = step
        self._term = None if step is None else self._starts.newest()

    def step(self) -> int | None:
        """Return the step of the checkpoint for the next life; None for the newest."""
        chosen = self._term is not None and self._starts.newest() == self._term
        return self._step if chosen else None
