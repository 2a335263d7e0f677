"""The local supervisor of a run, by script: no process is started."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ratchet.runtime.placement import Placement
from ratchet.runtime.role import RoleOutcome


class Supervisor:
    """Ends as told; or when it is stopped or killed."""

    outcome: RoleOutcome | Exception | None = None
    placement: Placement
    seen: Callable[[Supervisor], Any] = staticmethod(lambda _: None)
    on_escalation: Callable[[str], Awaitable[None]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        type(self).placement = kwargs["placement"]
        self.on_escalation = kwargs["on_escalation"]

    async def run(self, stop: asyncio.Event, kill: asyncio.Event) -> RoleOutcome:
        type(self).seen(self)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        if self.outcome is not None:
            return self.outcome
        waits = {asyncio.ensure_future(stop.wait()): "stop", asyncio.ensure_future(kill.wait()): ""}
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        assert done, "neither stopped nor killed"
        return RoleOutcome("stopped", " and ".join(sorted(waits[task] or "kill" for task in done)))
