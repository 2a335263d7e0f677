"""Launchers whose supervisor and registry are the test's own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from tests.helpers.config import small_config
from tests.helpers.launched import make_token

from ratchet.errors import ActorDead
from ratchet.messages import EndRun, RunDescribed
from ratchet.runtime.launch import Launch
from ratchet.runtime.node_config import LaunchOptions
from ratchet.runtime.placement import Placement
from ratchet.runtime.registry_link import Gone
from ratchet.runtime.role import RoleOutcome
from ratchet.runtime.rundir import Links, write_links
from ratchet.status import RunStatus
from ratchet.types import VersionRecord

CONFIG = small_config()


class World:
    """A supervisor and a registry of the test's own."""

    def __init__(self, root: Path) -> None:
        self.live: VersionRecord | None = None
        self.root = root
        self.told: list[EndRun] = []
        self.said: list[str] = []
        self.placement: Placement | None = None
        self.config = CONFIG.to_toml()
        self.listens = True
        self.away = 0

    def launch(self, kind: Any, **options: Any) -> Launch:
        self.ends = asyncio.Queue[RoleOutcome]()  # a queue belongs to one loop
        self.gone = asyncio.Queue[Gone]()
        recipe = self.root / "job.toml"
        recipe.write_text(CONFIG.to_toml())
        token = self.root / "token"
        if not token.exists():
            make_token(token)
        given = {
            "registry": "127.0.0.1:7000",
            "directory": self.root / "node",
            "token_file": str(token),
            **options,
        }
        return Launch(kind, recipe, LaunchOptions(**given), self.said.append)

    # --- in the place of LocalSupervisor

    def supervisor(self, config: Any, run: Any, *, placement: Placement, log: Any) -> Any:
        self.placement = placement
        if placement.roles[0][0] == "registry" and self.listens:
            write_links(run, Links("tcp:127.0.0.1:7001", placement.run_id))
        return self

    async def run(self, stop: asyncio.Event, kill: asyncio.Event) -> RoleOutcome:
        killed = asyncio.ensure_future(kill.wait())
        ended = asyncio.ensure_future(self.ends.get())
        await asyncio.wait({killed, ended}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            return ended.result()
        return RoleOutcome("stopped", "interrupted")

    # --- in the place of a visit

    @contextlib.asynccontextmanager
    async def visit(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        yield self

    def end_run(self, message: EndRun) -> None:
        self.told.append(message)

    async def describe(self, timeout_s: float) -> RunDescribed:
        if self.away:
            self.away -= 1
            raise ActorDead("registry could not be reached")
        return await self.meet()

    async def meet(self, *args: Any, **kwargs: Any) -> RunDescribed:
        return RunDescribed("run-1", self.config, RunStatus("x", 1.0, 1, self.live, 0, 0, ()))

    async def until_gone(self, *args: Any, **kwargs: Any) -> Gone:
        return await self.gone.get()


def played(launched: Launch, act: Callable[[], Any]) -> RoleOutcome:
    """Run, let something happen, and return the outcome."""

    async def main() -> RoleOutcome:
        async with asyncio.timeout(15):
            running = asyncio.create_task(launched.run())
            await asyncio.sleep(0.05)
            act()
            return await running

    return asyncio.run(main())
