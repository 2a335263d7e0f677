"""Checkpoints are written beside training, and their failures stay beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from tests.helpers.actors import RecordingLog
from tests.simulation.loop import run_virtual

from ratchet.actors.checkpointing import Checkpointing
from ratchet.messages import CheckpointWritten, StepTrained
from ratchet.staleness import Position


class Store:
    """Remembers the calls, and fails where it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.broken = ""

    async def begin(self, version: int) -> Path:
        return self._call("begin", version)

    async def finish(self, version: int, step: int, term: int, done: StepTrained | None) -> None:
        assert (step, term) == (version // 10, 3)
        assert done == StepTrained(3, step, (), {})  # of that step, though others follow
        self._call("finish", version)

    async def abandon(self, version: int) -> None:
        self._call("abandon", version)

    def _call(self, name: str, version: int) -> Path:
        self.calls.append((name, version))
        if name == self.broken:
            raise OSError(28, "No space left on device")
        return Path(str(version))


class Backend:
    """Writes until it is told to stop."""

    def __init__(self) -> None:
        self.written = asyncio.Event()
        self.saving: list[Path] = []

    async def begin_save(self, directory: Path) -> None:
        self.saving.append(directory)

    async def end_save(self) -> None:
        await self.written.wait()


class Scene:
    def __init__(self, every_steps: int) -> None:
        self.store, self.backend, self.log = Store(), Backend(), RecordingLog()
        self._position = Position(0, 0)
        self.checkpointing = Checkpointing(
            self.store,
            every_steps=every_steps,
            backend=self.backend,  # type: ignore[arg-type]
            publisher=self,  # type: ignore[arg-type]
            account=lambda: StepTrained(3, self._position.step, (), {}),
            announce=self._announce,
            spawn=self._spawn,
            now=asyncio.get_running_loop().time,
            log=self.log,
        )
        self.term = 3
        self.announced: list[CheckpointWritten] = []

    def _announce(self, written: CheckpointWritten) -> None:
        assert self.store.calls[-1] == ("finish", 10 * written.step)  # it is whole
        self.announced.append(written)

    @property
    def position(self) -> Position:
        return self._position

    def _spawn(self, coro: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(coro, name=name)

    async def step(self, number: int) -> None:
        self._position = Position(10 * number, number)
        await self.checkpointing.stepped()

    def events(self) -> list[str]:
        return [event for _, event, _ in self.log.events]


def play(every_steps: int, body: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await body(Scene(every_steps))

    run_virtual(main())


def test_every_so_many_steps_and_the_last_one() -> None:
    async def body(scene: Scene) -> None:
        scene.backend.written.set()
        for number in range(1, 6):
            await scene.step(number)
            await asyncio.sleep(0.1)
        await scene.checkpointing.last()
        assert scene.store.calls == [
            (call, version) for version in (20, 40, 50) for call in ("begin", "finish")
        ]
        assert scene.backend.saving == [Path("20"), Path("40"), Path("50")]
        assert scene.checkpointing.newest == 5
        assert scene.announced == [CheckpointWritten(3, step) for step in (2, 4, 5)]
        await scene.checkpointing.last()  # it is there already
        assert len(scene.store.calls) == 6

    play(2, body)


def test_training_goes_on_while_one_is_written_and_the_next_is_left_out() -> None:
    async def body(scene: Scene) -> None:
        for number in range(1, 4):
            await scene.step(number)
        assert scene.store.calls == [("begin", 10)]
        assert scene.events() == ["checkpoint_left_out"] * 2
        scene.backend.written.set()
        await scene.checkpointing.last()
        assert scene.store.calls[1:] == [("finish", 10), ("begin", 30), ("finish", 30)]

    play(1, body)


def test_a_failure_is_loud_and_the_next_one_is_tried() -> None:
    async def body(scene: Scene) -> None:
        scene.backend.written.set()
        for number, broken in enumerate(("begin", "finish", ""), 1):
            scene.store.broken = broken
            await scene.step(number)
            await asyncio.sleep(0.1)
        assert scene.events() == ["checkpoint_failed", "checkpoint_failed", "checkpoint_written"]
        assert ("abandon", 10) in scene.store.calls
        assert ("abandon", 20) in scene.store.calls
        assert (scene.checkpointing.newest, scene.checkpointing.num_failed) == (3, 2)
        assert scene.announced == [CheckpointWritten(3, 3)]

    play(1, body)


def test_none_are_written_where_none_are_wanted() -> None:
    async def body(scene: Scene) -> None:
        await scene.step(1)
        await scene.checkpointing.last()
        assert scene.store.calls == []

    play(0, body)
