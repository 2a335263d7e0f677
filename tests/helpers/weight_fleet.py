"""A registry, trainers and engine processes of weight sync, in one test.

The product's publisher and registry run on the test's own loop; each engine is a process.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any, ClassVar

from tests.helpers.actors import RecordingLog, make_system
from tests.helpers.weight_process import (
    BUCKET_BYTES,
    BUCKET_MIB,
    HOST,
    Child,
    State,
    big_tensors,
    run_engine,
)
from tests.helpers.weights import FakeSource, digest_of_tensors

from ratchet.actors.publisher import Published, Publisher
from ratchet.actors.transfer import Transfers
from ratchet.actors.version_registry import VersionRegistry
from ratchet.config import WeightsConfig
from ratchet.messages import AcquireTerm, RegisterRole
from ratchet.storage.versions import VersionStore
from ratchet.transport.weights.registry import open_sender
from ratchet.types import RoleInfo, VersionRecord


class Fleet:
    """A registry, and engines in processes of their own; also the directory of both."""

    living: ClassVar[list[Fleet]] = []

    def __init__(self, transport: str, timeout_s: float) -> None:
        self.living.append(self)
        self.weights: dict[str, Any] = {
            "transport": "broadcast" if transport == "shared memory" else transport,
            "shared_memory": transport == "shared memory",
            "bucket_mib": BUCKET_MIB,
            "staging_mib": 2 * BUCKET_MIB,
            "timeout_s": timeout_s,
        }
        self.store = VersionStore.open(None)
        self.children: dict[str, Child] = {}
        self.roles: dict[str, RoleInfo] = {}
        self.all: list[Child] = []
        self.trainers: list[Trainer] = []
        self.system = make_system(remote=self)
        self.registry = VersionRegistry.start(self.system, "registry", store=self.store)

    def ref(self, name: str) -> Any:
        return self.registry if name == "registry" else self.children[name]

    async def engine(self, name: str, *, incarnation: str = "a", seed: int = 99) -> RoleInfo:
        """Start an engine whose model holds the weights of a seed, under no version."""
        child = Child(name, run_engine, name, incarnation, seed, self.weights)
        self.all.append(child)
        self.children[name] = child
        role = self.roles[name] = RoleInfo("rollout", name, incarnation)
        await self.ask(self.registry, RegisterRole(role))
        return role

    async def trainer(self) -> Trainer:
        number = len(self.trainers)
        acquired = await self.ask(self.registry, AcquireTerm(f"trainer-{number}", "t"))
        trainer = Trainer(self, acquired.term, acquired.versions)
        self.trainers.append(trainer)
        return trainer

    async def ask(self, ref: Any, message: Any, *, timeout: float | None = None) -> Any:
        return await ref.ask(message, block=False, timeout=timeout or 30.0)

    async def kill(self, name: str) -> None:
        await asyncio.to_thread(self.children[name].kill)

    async def states(self, *but: str) -> dict[str, State]:
        return {n: await child.state() for n, child in self.children.items() if n not in but}

    async def end(self) -> None:
        for trainer in self.trainers:
            await trainer.sender.close()
        self.registry.stop(block=False)
        for child in self.all:
            await asyncio.to_thread(child.kill)
            child.end()

    def state_of(self, version: int) -> str:
        return {record.version: record.state for record in self.store.records()}[version]


class Trainer:
    """The product's publisher over a few tensors; weights of step n are those of seed n."""

    def __init__(self, fleet: Fleet, term: int, versions: tuple[VersionRecord, ...]) -> None:
        self.fleet = fleet
        self.source = FakeSource(big_tensors(0))
        self.sender = open_sender(WeightsConfig(**fleet.weights), HOST, self.source)
        self.log = RecordingLog()
        ends: Any = {"directory": fleet, "ask": fleet.ask, "now": monotonic, "log": self.log}
        timeout_s = fleet.weights["timeout_s"]
        self.publisher = Publisher(
            Transfers(sender=self.sender, timeout_s=timeout_s, **ends), **ends
        )
        self.publisher.begin(term, versions)
        self.step = -1

    async def publish(self) -> Published:
        async with self.publisher.changing():
            self.step += 1
            self.source.tensors = big_tensors(self.step)
            await self.publisher.reserve(self.step)
        return await self.publisher.transfer()

    async def hold(self, *names: str) -> None:
        """Check that engines hold what the trainer has, and go on with it."""
        digest = digest_of_tensors(self.source.tensors, BUCKET_BYTES)
        expected = State(self.publisher.version, False, digest)
        for name in names:
            assert await self.fleet.children[name].state() == expected, name

    async def sync_well(self, *names: str) -> None:
        published = await self.publish()
        assert published.failed == (), self.log.events
        assert sorted(published.loaded) == sorted(names)
        await self.hold(*names)
