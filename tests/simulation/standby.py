"""A standby of a world: the product's actor on a node of its own, and the launcher it is part of.

Consumes the end of the trainer, as the registry tells it; produces a launcher with a trainer in its
place, as `ratchet launch trainer --standby` does, and stands by again when that has been replaced.
Waits for what the actor waits for, then for that launcher's end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from ratchet.actors.standby import StandbyActor
from ratchet.types import RoleInfo

if TYPE_CHECKING:
    from tests.simulation.launcher import Launcher
    from tests.simulation.seen import ProcessEnd
    from tests.simulation.sessions import Host

    from ratchet.actors.ref import LocalRef

STANDBY = "standby"

StartActor = Callable[[str, "Callable[[Host], LocalRef]"], "tuple[Host, LocalRef, ProcessEnd]"]


class Standby:
    """Takes the trainer's place whenever it is vacant.

    Args:
        start: begins the life of a process, and of its actor in it.
        return_s: how long a trainer that has ended may take to come back.
        take_over: starts a launcher with a trainer.
    """

    def __init__(
        self, start: StartActor, *, return_s: float, take_over: Callable[[], Launcher]
    ) -> None:
        self.watches = True
        """it will take the trainer's place"""
        self._start = start
        self._return_s = return_s
        self._take_over = take_over
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while await self._vacancy():
            launcher = self._take_over()
            self.watches = False
            await launcher.task
            if launcher.outcome is None or not launcher.outcome.replaced:
                return
            self.watches = True
        self.watches = False

    async def _vacancy(self) -> bool:
        """Wait for the end of the trainer; False if the run has ended first, or the watch."""
        reasons: list[str] = []
        _, _, end = self._start(
            STANDBY,
            lambda host: StandbyActor.start(
                host.system,
                RoleInfo("standby", host.name, host.incarnation, str(host.address)),
                return_s=self._return_s,
                vacant=reasons.append,
            ),
        )
        await end.event.wait()
        return bool(reasons)
