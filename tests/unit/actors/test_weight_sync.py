from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from tests.simulation.loop import run_virtual

from ratchet.actors.publisher import Published
from ratchet.actors.step_metrics import StepMetrics
from ratchet.actors.weight_sync import SyncEngine, WeightSync
from ratchet.types import RoleInfo

ENGINE = RoleInfo("rollout", "rollout-0", "a")


class Publisher:
    """Nothing is live, and the transfer of the weights in hand is about to end."""

    def __init__(self) -> None:
        self.live = None
        self.end = asyncio.Event()
        self.again = 0

    async def transfer(self) -> Published:
        await self.end.wait()
        return Published(1)

    async def catch_up(self, engine: RoleInfo) -> None:
        return None

    async def publish_again(self) -> Published:
        self.again += 1
        return Published(2, (ENGINE.name,))


def test_an_engine_that_finds_nothing_live_is_offered_it_again() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        offers: list[tuple[float, SyncEngine]] = []
        double: Any = Publisher()

        def spawn(coro: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
            return loop.create_task(coro, name=name)

        sync = WeightSync(
            double,
            spawn=spawn,
            after=lambda delay_s, message: offers.append((delay_s, message)),
            metrics=StepMetrics(loop.time),
            wait_for=double,
            patience_s=100.0,
        )
        sync.joined(ENGINE)
        sync.publish()
        sync.sync(ENGINE)
        await asyncio.sleep(1)
        assert double.again == 0  # a transfer is in flight, and was not for this engine
        assert offers == [(1.0, SyncEngine(ENGINE))]
        double.end.set()
        await asyncio.sleep(1)
        sync.sync(ENGINE)
        await asyncio.sleep(1)
        assert double.again == 1

    run_virtual(main())
