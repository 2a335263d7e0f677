"""Actors, processes and files of a world that can be looked into."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.counter_checks import Ledgered
from tests.simulation.launcher import KILLED

from ratchet.actors.buffer import BufferActor
from ratchet.actors.trainer import TrainerActor
from ratchet.messages import (
    BatchReady,
    Down,
    Message,
    RequestBatch,
    RoleRegistered,
    VersionUpdated,
)
from ratchet.stats import BufferStats
from ratchet.storage.ledger import GroupLedger
from ratchet.storage.versions import VersionStore

if TYPE_CHECKING:
    from tests.simulation.sessions import Host, Network


class ProcessEnd:
    """A process ends with its actor."""

    def __init__(self, network: Network, host: Host) -> None:
        self.host = host
        self.name = host.name
        self.event = asyncio.Event()
        self.reason = ""
        self.at = 0.0
        """when"""
        self._network = network
        self._leaving: asyncio.Task[None] | None = None

    def tell(self, message: Message) -> None:
        """Hear of the actor's end, inside its process."""
        assert isinstance(message, Down)
        self.reason = message.reason
        self._leaving = asyncio.ensure_future(self._leave())

    async def _leave(self) -> None:
        await self.host.node.stop(1.0)
        self.kill(self.reason)

    def kill(self, reason: str = KILLED) -> None:
        """End the process now."""
        if not self.event.is_set():
            self.reason = reason
            self.at = self._network.loop.now
            self.event.set()
            self._network.kill(self.host)


class Buffer(BufferActor):
    """Can be looked into."""

    last: Buffer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.began = Ledgered.of(kwargs["ledger"])
        self.told: list[BufferStats] = []
        """what went out beside each batch"""
        super().__init__(*args, **kwargs)
        self.hears: list[Callable[[int, int], None]] = []
        """told of the term that each batch is handed to, and of the newest one it has heard of"""
        self._newest_term = self.asked_in_term = 0
        Buffer.last = self

    def receive(self, message: Any) -> None:
        terms: list[int] = []
        match message:
            case RequestBatch() if message.buffer == self.role.incarnation:
                terms = [message.term]
                self.asked_in_term = max(self.asked_in_term, message.term)
            case VersionUpdated():
                terms = [message.record.term]
            case RoleRegistered():
                terms = [record.term for record in message.versions]
            case _:
                pass
        self._newest_term = max([self._newest_term, *terms])
        super().receive(message)

    def _serve(self) -> list[tuple[str, BatchReady]]:
        before = self._batches.handed
        told = super()._serve()
        handed = self._batches.handed
        if handed is not None and handed is not before:
            self.told.append(handed[1].stats)
            for hear in self.hears:
                hear(handed[1].term, self._newest_term)
        return told


class SeenTrainer(TrainerActor):
    """Can be looked into."""

    last: SeenTrainer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        SeenTrainer.last = self


class KeptVersions(VersionStore):
    """Can be read after its registry has stopped."""

    def close(self) -> None:
        pass


class KeptLedger(GroupLedger):
    """Can be read after its buffer has stopped, or failed."""

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        pass
