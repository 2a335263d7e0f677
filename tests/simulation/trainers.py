"""Trainers of a world that die and come back: their checkpoints, and what is trained in the end.

Consumes begun and finished checkpoints; produces files on the disk of the world, by the product's
own `Checkpoints`. Waits, as a real one does, for the time that writing takes: a trainer that dies
meanwhile leaves a half of one. What was not synced is lost with the machine (`lose_power`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.actors.checkpointing import StartingPoint
from ratchet.storage.checkpoint import CheckpointFacts
from ratchet.storage.checkpoints import Checkpoints, Disk
from ratchet.storage.starts import Start

if TYPE_CHECKING:
    from tests.simulation.lives import Trainer
    from tests.simulation.world import World

    from ratchet.messages import StepTrained


class Unsafe(Disk):
    """Knows what a power cut would take: renames whose directory was not synced afterwards."""

    def __init__(self) -> None:
        self._renamed: list[tuple[Path, Path]] = []

    def sync(self, path: Path) -> None:
        self._renamed = [(old, new) for old, new in self._renamed if new.parent != path]
        super().sync(path)

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self._renamed.append((old, new))

    def lose_power(self) -> None:
        """Take back what would not be there after a power cut."""
        while self._renamed:
            old, new = self._renamed.pop()
            if new.exists():
                new.rename(old)


class WorldCheckpoints:
    """Implements `CheckpointStore`, for each trainer of a world anew.

    Args:
        root: of the checkpoints of the run.
        keep: how many stay.
        write_s: seconds that each takes.
    """

    def __init__(self, root: Path, *, keep: int, write_s: float) -> None:
        self.disk = Unsafe()
        self._checkpoints = Checkpoints(root, keep=keep, disk=self.disk)
        self._write_s = write_s

    def start(self) -> StartingPoint | None:
        """Return where a trainer that starts now goes on from."""
        if not self._checkpoints.whole():
            return None
        found = self._checkpoints.find()
        facts = found.facts
        return StartingPoint(found.path, facts.version, facts.step, facts.done)

    def wrote(self, start: StartingPoint) -> int:
        """Return the term that made a checkpoint."""
        return next(c.facts.term for c in self._checkpoints.whole() if c.path == start.directory)

    async def begin_term(self, term: int, start: StartingPoint | None, *, is_first: bool) -> None:
        del is_first
        version, step = (None, 0) if start is None else (start.version, start.step)
        self._checkpoints.starts.record(Start(term, version, step))

    async def begin(self, version: int) -> Path:
        return self._checkpoints.begin(version)

    async def finish(self, version: int, step: int, term: int, done: StepTrained | None) -> None:
        await asyncio.sleep(self._write_s)
        self._checkpoints.finish(CheckpointFacts("r", version, step, term, "", done, 0.0))

    async def abandon(self, version: int) -> None:
        self._checkpoints.abandon(version)


def surviving(world: World) -> list[list[tuple[int, int]]]:
    """Return (group, attempt) of all that is in the weights of the leader, by step."""
    by_term = {trainer.actor._publisher.term: trainer for trainer in world.trainers}
    trainer: Trainer | None = world.leader
    last: int | None = None
    found: list[list[tuple[int, int]]] = []
    while trainer is not None:
        start = trainer.start
        first = 0 if start is None else start.step
        num_steps = None if last is None else last - first
        found = trainer.backend.steps[:num_steps] + found
        if start is None:
            break
        trainer, last = by_term[trainer.parent], start.step
    return found


def check(world: World) -> Iterator[str]:
    """Say what is wrong with what the surviving weights were trained on."""
    steps = surviving(world)
    trained = [key for step in steps for key in step]
    twice = [group for group, count in Counter(g for g, _ in trained).items() if count > 1]
    if twice:
        yield f"the weights have been trained on groups {twice} more than once"
    told = {row.group_id: row.attempt for row in world.ledger.groups("trained", "committed")}
    # not told yet, perhaps; of the whole line: who begins at the last step has none of its own
    last = {key for step in steps[-1:] for key in step}
    missing = {key for key in set(trained) - last if told.get(key[0]) != key[1]}
    if missing:
        yield f"in the weights, and not in the ledger: {missing}"
    # whose steps are lost the buffer hears from the request of the trainer that goes on without
    asked = world.buffer.asked_in_term >= world.leader.actor._publisher.term
    sure = (
        told if asked else {row.group_id: row.attempt for row in world.ledger.groups("committed")}
    )
    lost = {key for key in sure.items() if key not in set(trained)}
    if lost:
        yield f"in the ledger, and not in the weights: {lost}"
