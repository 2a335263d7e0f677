"""The trainer's engines, and the version that each of them holds.

Consumes engines that join, leave and fail; produces transfers of the weights in hand, one at a
time, and an offer to whoever lacks them. Waits for

* the transfer in flight: ends by `weights.timeout_s`;
* an engine that takes the weights in hand, trying again every `_RETRY_S`; unblocked by an engine
  that joins, and by `stop`; fails the run after `trainer.batch_timeout_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar

from ratchet.actors.publisher import Published, Publisher
from ratchet.actors.step_metrics import StepMetrics
from ratchet.messages import Message
from ratchet.types import RoleInfo

T = TypeVar("T")

_RETRY_S: Final = 1.0


class SyncEngine(Message, frozen=True):
    """To the trainer itself: an engine has no live version yet; offer it one."""

    engine: RoleInfo


class SpawnFunction(Protocol):
    """`Actor.spawn`: a child task that ends with the actor, and fails it when it raises."""

    def __call__(self, coro: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Run it beside the mailbox."""
        ...


class WaitFunction(Protocol):
    """`RoleActor.wait_for`: the wait is visible, and fails the run at its deadline."""

    def __call__(
        self, awaitable: Awaitable[T], *, on: str, what: str, within_s: float
    ) -> Awaitable[T]:
        """Wait for another party."""
        ...


class WeightSync:
    """Brings engines to the weights in hand, and counts what that takes."""

    def __init__(
        self,
        publisher: Publisher,
        *,
        spawn: SpawnFunction,
        after: Callable[[float, SyncEngine], object],
        wait_for: WaitFunction,
        patience_s: float,
        metrics: StepMetrics,
    ) -> None:
        self.engines: dict[str, RoleInfo] = {}
        self._publisher = publisher
        self._spawn = spawn
        self._after = after
        self._wait_for = wait_for
        self._patience_s = patience_s
        self._metrics = metrics
        self._offers: set[RoleInfo] = set()  # engines that failed, to be offered weights again
        self._publishing: asyncio.Task[Published] | None = None
        self._stopping = False
        self._engine_there = asyncio.Event()  # or there will be no need of one

    @property
    def publishing(self) -> bool:
        """Whether a transfer to all engines is in flight."""
        return self._publishing is not None and not self._publishing.done()

    def joined(self, engine: RoleInfo) -> None:
        """Note an engine that is alive."""
        self.engines[engine.name] = engine
        self._engine_there.set()

    def left(self, engine: RoleInfo) -> None:
        """Forget an engine, unless it is back already in another life."""
        if self.engines.get(engine.name) == engine:
            del self.engines[engine.name]
        if not self.engines and not self._stopping:
            self._engine_there.clear()

    def stop(self) -> None:
        """End the wait for an engine: the run is to stop."""
        self._stopping = True
        self._engine_there.set()

    def publish(self) -> None:
        """Offer the version just reserved to every engine, in the background."""
        transfer = self._publisher.transfer()
        self._publishing = self._spawn(self._sync_all(transfer), name="publish")

    async def transferred(self) -> None:
        """Wait for the transfer in flight, if there is one."""
        if self._publishing is not None:
            await self._publishing
            self._publishing = None

    async def begin(self, step: int) -> None:
        """Make the first weights live: they are published like all others.

        Raises:
            RunFailed: if no engine comes in time, or none takes them.
        """
        there = self._engine_there.wait()
        await self._wait_for(
            there, on="rollout", what="the first engine", within_s=self._patience_s
        )
        async with self._publisher.changing():
            await self._publisher.reserve(step)
        self.publish()
        await self.until_live("an engine to hold the first version")

    async def until_live(self, what: str) -> None:
        """Wait until an engine holds the weights in hand, or the run is to stop.

        Raises:
            RunFailed: if none does in time.
        """
        await self._wait_for(self._live(), on="rollout", what=what, within_s=self._patience_s)

    async def _live(self) -> None:
        await self.transferred()
        while self._publisher.live is None and not self._stopping:
            await asyncio.sleep(_RETRY_S)
            await self._engine_there.wait()  # without one, every try would burn a number
            self._publish_again()
            await self.transferred()

    def sync(self, engine: RoleInfo) -> None:
        """Bring an engine that joined late, or failed, to the live version, in the background."""
        self._offers.discard(engine)
        self._spawn(self._sync(engine), name=f"sync-{engine.name}")

    async def _sync(self, engine: RoleInfo) -> None:
        if self.engines.get(engine.name) != engine:
            return
        published = await self._publisher.catch_up(engine)
        if published is None:
            self._publish_again()
            self._offer_later(engine)  # a transfer that just ends may not have been for it
            return
        if published.metrics:
            self._metrics.caught_up()
        self._offer_again(published)

    async def _sync_all(self, transfer: Awaitable[Published]) -> Published:
        published = await transfer
        if published.metrics:
            self._metrics.synced(published.seconds, published.metrics)
        self._offer_again(published)
        return published

    def _publish_again(self) -> None:
        """Publish although no step was taken: no engine holds the weights in hand."""
        if not self.publishing:
            again = self._publisher.publish_again()
            self._publishing = self._spawn(self._sync_all(again), name="publish-again")

    def _offer_again(self, published: Published) -> None:
        for engine in published.failed:
            self._offer_later(engine)

    def _offer_later(self, engine: RoleInfo) -> None:
        if engine not in self._offers:
            self._offers.add(engine)
            self._after(_RETRY_S, SyncEngine(engine))
