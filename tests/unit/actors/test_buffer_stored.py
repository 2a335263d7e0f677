"""A buffer that keeps payloads: what finished is not generated again, whoever is lost."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.buffer_world import World, ids
from tests.simulation.loop import run_virtual

from ratchet.messages import CheckpointWritten, StepTrained
from ratchet.types import VersionRecord


class Lives:
    """The lives of one buffer, one after the other on the same files."""

    def __init__(self, directory: Path, *, versions: int = 6) -> None:
        self.directory = directory
        self.versions = versions
        self._world: World | None = None

    async def begin(self, **sections: Any) -> World:
        world = self._world = World(versions=self.versions, directory=self.directory, **sections)
        await world.settle()
        return world

    async def end(self) -> None:
        if self._world is not None:
            await self._world.ref.stop(block=False)

    def states(self) -> list[str]:
        with closing(sqlite3.connect(self.directory / "ledger.sqlite")) as connection:
            rows = connection.execute("SELECT state FROM groups ORDER BY group_id")
            return [state for (state,) in rows]

    def payloads(self) -> list[int]:
        return sorted(int(path.stem) for path in (self.directory / "payloads").iterdir())


def play(directory: Path, body: Callable[[Lives], Awaitable[None]], versions: int = 6) -> None:
    async def main() -> None:
        lives = Lives(directory, versions=versions)
        try:
            await body(lives)
        finally:
            await lives.end()

    run_virtual(main())


async def train(world: World, step: int, term: int = 1) -> list[int]:
    """Take one step; return the groups."""
    for assignment in await world.claim(len(world.assignments) + 2, step - 1):
        await world.finish(assignment, version=step - 1)
    await world.request(step - 1, term=term)
    trained = ids(world.batches[-1])
    await world.tell(StepTrained(term, step, tuple(trained), {}))
    return trained


def test_a_new_life_hands_out_what_the_last_one_finished(tmp_path: Path) -> None:
    async def body(lives: Lives) -> None:
        world = await lives.begin()
        a, b, c, _ = await world.claim(4)
        for assignment in (c, a, b):
            await world.finish(assignment)
        await lives.end()

        world = await lives.begin()
        assert world.ref.is_alive()
        (again,) = await world.claim(9)  # of 4 places 3 are taken
        assert (again.group_id, again.attempt) == (3, 1)
        assert world.batches == []
        await world.request()
        (ready,) = world.batches
        assert ids(ready) == [0, 1]
        assert [group.attempt for group in ready.batch.groups] == [1, 1]
        assert world.ledger.counts()["finished"] == 1
        await lives.end()

    play(tmp_path, body)


def test_what_has_become_stale_meanwhile_is_judged(tmp_path: Path) -> None:
    async def body(lives: Lives) -> None:
        world = await lives.begin()
        for assignment in await world.claim(4):
            await world.finish(assignment)
        await lives.end()
        world = await lives.begin()
        await world.request(version=3)
        assert world.batches == []
        assert world.ledger.reasons() == {"stale": 4}
        await lives.end()
        assert lives.payloads() == []

    play(tmp_path, body)


def test_a_trainer_that_falls_back_trains_the_lost_groups_anew(tmp_path: Path) -> None:
    """However many there are, the queue never holds more than its capacity."""

    async def body(lives: Lives) -> None:
        world = await lives.begin(buffer={"max_staleness": 2})
        first = await train(world, 1)
        lost = [await train(world, step) for step in (2, 3)]
        await world.tell(CheckpointWritten(1, 1))
        assert world.ledger.counts()["committed"] == 2
        issued = len(world.assignments)
        await world.request(version=1, term=2)  # that is the checkpoint's
        assert sorted(ids(world.batches[-1])) == sorted(lost[0])
        assert world.ledger.counts()["finished"] == 2
        await world.tell(StepTrained(2, 2, tuple(lost[0]), {}))
        world.records.append(VersionRecord(6, 2, 2, 1, "live", "d"))
        await world.request(version=6, step=2, term=2)
        assert sorted(ids(world.batches[-1])) == sorted(lost[1])
        assert len(world.assignments) == issued, "generated again"
        await lives.end()
        assert [lives.states()[group_id] for group_id in first] == ["committed"] * 2

    play(tmp_path, body)


def test_lost_groups_wait_for_room(tmp_path: Path) -> None:
    async def body(lives: Lives) -> None:
        world = await lives.begin(buffer={"max_staleness": 4})
        for step in (1, 2, 3, 4):
            await train(world, step)
        await world.request(version=0, term=2)
        assert len(ids(world.batches[-1])) == 2
        counts = world.ledger.counts()
        assert (counts["batched"], counts["finished"], counts["issued"]) == (2, 4, 2)  # 4 places
        assert await world.claim(99) == []  # the lost ones come first
        await lives.end()

    play(tmp_path, body)


def test_a_checkpoint_of_an_older_trainer_says_nothing(tmp_path: Path) -> None:
    async def body(lives: Lives) -> None:
        world = await lives.begin()
        await train(world, 1)
        await train(world, 2, term=2)
        await world.tell(CheckpointWritten(1, 2))
        assert world.ledger.counts()["committed"] == 0
        await world.tell(CheckpointWritten(2, 2))
        await lives.end()
        assert lives.states()[:2] == ["committed"] * 2
        assert lives.payloads() == []

    play(tmp_path, body)


@pytest.mark.parametrize("torn", [True, False])
def test_a_payload_that_is_gone_is_generated_again(tmp_path: Path, torn: bool) -> None:
    async def body(lives: Lives) -> None:
        world = await lives.begin()
        for assignment in await world.claim(4):
            await world.finish(assignment)
        await lives.end()
        path = lives.directory / "payloads" / "2.payload"
        if torn:
            path.write_bytes(path.read_bytes()[:-3])
        else:
            path.unlink()
        world = await lives.begin()
        await world.request()
        assert ids(world.batches[-1]) == [0, 1]
        assert [a.group_id for a in await world.claim(1)] == [2]
        await lives.end()

    play(tmp_path, body)
