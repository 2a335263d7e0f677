"""A supervisor, on a virtual loop, whose children do what the test says and keep a diary."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tests.helpers.actors import RecordingLog
from tests.simulation.loop import run_virtual

from ratchet.actors.restarts import End, EndKind, Rules
from ratchet.actors.supervisor import Member, Supervisor


class Scripted:
    """Writes what is done to it, and when, into a diary."""

    def __init__(self, name: str, diary: list[tuple[float, str]]) -> None:
        self.name = name
        self._diary = diary
        self.refusals = 0
        """starts that raise"""
        self.stop_takes_s: float | None = 0.0
        """None: for ever"""
        self._end: asyncio.Future[End] | None = None

    def _note(self, what: str) -> None:
        self._diary.append((asyncio.get_running_loop().time(), f"{what} {self.name}"))

    async def start(self) -> None:
        self._note("start")
        self._end = asyncio.get_running_loop().create_future()
        if self.refusals:
            self.refusals -= 1
            raise OSError("no process to be had")

    def end(self, kind: EndKind = "abnormal", reason: str = "") -> None:
        assert self._end is not None
        if not self._end.done():
            self._end.set_result(End(self.name, kind, reason or f"{self.name} broke"))

    async def ended(self) -> End:
        assert self._end is not None
        return await asyncio.shield(self._end)

    async def stop(self) -> None:
        self._note("stop")
        await asyncio.sleep(1e9 if self.stop_takes_s is None else self.stop_takes_s)
        self.end(reason="stopped by a signal")

    async def kill(self) -> None:
        self._note("kill")
        self.end(reason="killed")


@dataclass
class World:
    """Children a, b and c under one supervisor."""

    diary: list[tuple[float, str]]
    children: dict[str, Scripted]
    log: RecordingLog
    supervisor: Supervisor

    def __getitem__(self, name: str) -> Scripted:
        return self.children[name]

    def take(self) -> list[tuple[float, str]]:
        """What was done since the last look."""
        taken, self.diary[:] = self.diary[:], []
        return taken

    def what(self) -> list[str]:
        return [what for _, what in self.take()]


def world(*, stop_s: float = 5.0, names: str = "abc", **options: Any) -> World:
    diary: list[tuple[float, str]] = []
    log = RecordingLog()
    children = {name: Scripted(name, diary) for name in names}
    rules = {"max_restarts": 5} | {k: v for k, v in options.items() if k in Rules.__annotations__}
    rest = {k: v for k, v in options.items() if k not in rules}
    members = [
        Member(child, significant="until" in rules, stop_s=stop_s) for child in children.values()
    ]
    supervisor = Supervisor("root", members, Rules(**rules), log=log, **rest)
    return World(diary, children, log, supervisor)


def scenario(body: Callable[[World], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        made = world(**options)
        await made.supervisor.start()
        await asyncio.sleep(2**-10)  # a power of two keeps sums exact
        assert made.what() == ["start a", "start b", "start c"]
        return await body(made)

    return run_virtual(main())


async def settle() -> None:
    await asyncio.sleep(2**-20)
