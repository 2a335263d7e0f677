"""A tree of roles that end as the test says, on a virtual loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tests.helpers.actors import RecordingLog
from tests.helpers.config import small_config
from tests.simulation.loop import run_virtual

from ratchet.actors.restarts import End
from ratchet.runtime.role import RoleOutcome
from ratchet.runtime.tree import build_tree, role_end, run_tree
from ratchet.types import RoleKind

ALL: tuple[tuple[RoleKind, str], ...] = (
    ("registry", "registry"),
    ("buffer", "buffer"),
    ("trainer", "trainer-0"),
    ("rollout", "rollout-0"),
    ("rollout", "rollout-1"),
)
REVERSED = ["rollout-1", "rollout-0", "trainer-0", "buffer", "registry"]


class Role:
    def __init__(self, name: str, diary: list[str]) -> None:
        self.name = name
        self.starts = 0
        self.hangs = False
        self._diary = diary
        self._end: asyncio.Future[End]

    async def start(self) -> None:
        self.starts += 1
        self._end = asyncio.get_running_loop().create_future()

    def end(self, status: str, detail: str = "") -> None:
        self.leave(RoleOutcome(status, detail))

    def leave(self, words: RoleOutcome) -> None:
        if not self._end.done():
            self._end.set_result(role_end(self.name, words))

    async def ended(self) -> End:
        return await asyncio.shield(self._end)

    async def stop(self) -> None:
        self._diary.append(self.name)
        if self.hangs:
            await asyncio.Event().wait()
        self.end("stopped")

    async def kill(self) -> None:
        self.end("failed", f"{self.name} died of signal 9")


class World:
    def __init__(self, roles: tuple[tuple[RoleKind, str], ...], **runtime: Any) -> None:
        self.stopped: list[str] = []
        self.told: list[str] = []
        self.log = RecordingLog()
        self.stop, self.kill = asyncio.Event(), asyncio.Event()
        self.roles = {name: Role(name, self.stopped) for _, name in roles}
        self.stops_of_training = 0
        self._has_trainer = "trainer-0" in self.roles
        root = build_tree(
            [(kind, self.roles[name]) for kind, name in roles],
            small_config(runtime=runtime),
            log=self.log,
            on_escalation=self._tell,
        )
        self.outcome = asyncio.ensure_future(
            run_tree(root, stop=self.stop, kill=self.kill, stop_training=self._stop_training)
        )

    async def _tell(self, cause: str) -> None:
        self.told.append(cause)

    def _stop_training(self) -> bool:
        self.stops_of_training += 1
        return self._has_trainer

    def __getitem__(self, name: str) -> Role:
        return self.roles[name]


def scenario(
    body: Callable[[World], Awaitable[Any] | None],
    roles: tuple[tuple[RoleKind, str], ...] = ALL,
    **runtime: Any,
) -> tuple[RoleOutcome, World]:
    async def main() -> tuple[RoleOutcome, World]:
        world = World(roles, **runtime)
        await asyncio.sleep(1)
        assert [role.starts for role in world.roles.values()] == [1] * len(roles)
        acting = body(world)
        if acting is not None:
            await acting
        return await world.outcome, world

    return run_virtual(main())
