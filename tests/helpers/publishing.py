"""A publisher whose registry, engines and sender answer by script, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tests.helpers.actors import RecordingLog
from tests.helpers.refs import RecordedDirectory
from tests.simulation.loop import run_virtual

from ratchet.actors.publisher import Published, Publisher
from ratchet.actors.transfer import Transfers
from ratchet.errors import StaleTerm, TransferFailed
from ratchet.messages import (
    BurnVersion,
    CommitVersion,
    LoadWeights,
    ReserveVersion,
    VersionBurnt,
    VersionCommitted,
    VersionReserved,
    WeightsLoaded,
)
from ratchet.transport.mailbox.base import Ref
from ratchet.transport.weights.base import SendReport
from ratchet.types import RoleInfo, WeightManifest, WeightProbe, WeightRoute

E0 = RoleInfo("rollout", "rollout-0", "a")
E1 = RoleInfo("rollout", "rollout-1", "b")
LATE = RoleInfo("rollout", "rollout-2", "c")
TERM = 4
TIMEOUT_S = 60.0
SEND_S = 5.0
COPY_S = 0.5


class Sender:
    """Takes `SEND_S` for a transfer; fails where `lost` says so."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events
        self.fails: str | None = None
        self.lost: dict[str, str] = {}
        """engines, as planned, whose part is reported lost"""
        self.sending = 0

    def plan(
        self, term: int, version: int, step: int, engines: Sequence[str], *, catch_up: bool = False
    ) -> tuple[WeightManifest, Mapping[str, WeightRoute]]:
        self.events.append(("catch up" if catch_up else "plan", version, tuple(engines)))
        routes = {e: WeightRoute("t", "b", "", 0, e, r, 2, 1.0) for r, e in enumerate(engines, 1)}
        return WeightManifest(term, version, step, (), (), {}), routes

    async def send(self, manifest: WeightManifest) -> SendReport:
        assert self.sending == 0, "two versions in flight"
        self.sending += 1
        try:
            await asyncio.sleep(SEND_S)
        except asyncio.CancelledError:
            self.events.append(("cancelled", manifest.version))
            raise
        finally:
            self.sending -= 1
        self.events.append(("sent", manifest.version))
        if self.fails is not None:
            raise TransferFailed(self.fails)
        return SendReport(digest(manifest.version), 8, 1, 0.5, SEND_S, self.lost)

    def leave(self, engine: str, reason: str) -> None:
        self.events.append(("leave", engine, reason))

    async def close(self) -> None:
        pass


def digest(version: int) -> str:
    return f"digest-{version}"


class Snapshot:
    """Takes `COPY_S` for a copy."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events
        self.newest: int | None = None

    async def take(self, version: int) -> None:
        self.newest = None
        await asyncio.sleep(COPY_S)
        self.newest = version
        self.events.append(("copied", version))

    @contextmanager
    def reading(self, version: int) -> Iterator[None]:
        assert self.newest == version
        self.events.append(("reads", version))
        yield
        self.events.append(("read", version))


class World:
    """A publisher; registry and engines answer by script, and every ask is an event."""

    def __init__(self, *, snapshot: bool = False, probe: Any = None) -> None:
        self.events: list[Any] = []
        self.directory = RecordedDirectory()
        self.sender = Sender(self.events)
        self.log = RecordingLog()
        self.rollouts: tuple[RoleInfo, ...] = (E0, E1)
        self.probes: list[WeightProbe | None] = []
        """of the manifests that engines were asked to load, in order"""
        self.next = 0
        self.reserve_s = 0.0
        """how long the registry takes for a number"""
        self.newest_term = TERM
        self.engines: dict[str, Callable[[int], WeightsLoaded]] = {}
        ends: Any = {
            "directory": self.directory,
            "ask": self._ask,
            "now": asyncio.get_running_loop().time,
            "log": self.log,
        }
        self.publisher = Publisher(
            Transfers(sender=self.sender, timeout_s=TIMEOUT_S, **ends),
            **ends,
            snapshot=Snapshot(self.events) if snapshot else None,
            probe=probe,
        )
        self.publisher.begin(TERM, ())

    async def _ask(self, ref: Ref, message: Any, *, timeout: float | None = None) -> Any:
        await asyncio.sleep(0)
        if isinstance(message, LoadWeights):
            assert timeout is not None
            assert timeout > TIMEOUT_S
            version = message.manifest.version
            self.events.append(("load", ref.name, version))
            self.probes.append(message.manifest.probe)
            await asyncio.sleep(SEND_S + 1)
            return self.engines.get(ref.name, loaded(ref.name))(version)
        if message.term < self.newest_term:
            raise StaleTerm(f"term {message.term} is fenced by term {self.newest_term}")
        if isinstance(message, ReserveVersion):
            await asyncio.sleep(self.reserve_s)
            version, self.next = self.next, self.next + 1
            self.events.append(("reserve", version, message.step, message.parent))
            return VersionReserved(version, self.rollouts)
        if isinstance(message, CommitVersion):
            self.events.append(("commit", message.version, message.digest))
            return VersionCommitted(message.version)
        assert isinstance(message, BurnVersion)
        self.events.append(("burn", message.version, message.reason))
        return VersionBurnt(message.version)

    async def step(self, step: int) -> None:
        async with self.publisher.changing():
            await self.publisher.reserve(step)
            self.events.append(("step", step, self.now()))

    async def publish(self, step: int) -> Published:
        await self.step(step)
        return await self.publisher.transfer()

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()

    def of(self, kind: str) -> list[Any]:
        return [event[1:] for event in self.events if event[0] == kind]


def loaded(name: str, words: str | None = None) -> Callable[[int], WeightsLoaded]:
    def answer(version: int) -> WeightsLoaded:
        return WeightsLoaded(name, version, words or digest(version), 0.0, 0.0, 0.0)

    return answer


def fails(error: Exception) -> Callable[[int], WeightsLoaded]:
    def answer(version: int) -> WeightsLoaded:
        raise error

    return answer


def scenario(body: Callable[[World], Awaitable[None]], *, snapshot: bool = False) -> None:
    async def main() -> None:
        before = asyncio.all_tasks()
        await body(World(snapshot=snapshot))
        assert asyncio.all_tasks() == before

    run_virtual(main())


def interrupt_loads(world: World, after_s: float, **errors: Exception | None) -> None:
    """Engines by name: each raises after a while; one with None never answers."""

    async def ask(ref: Ref, message: Any, *, timeout: float | None = None) -> Any:
        name = ref.name.replace("-", "_")
        if isinstance(message, LoadWeights) and name in errors:
            await asyncio.sleep(after_s)
            error = errors[name]
            if error is None:
                await asyncio.Event().wait()
            else:
                raise error
        return await World._ask(world, ref, message, timeout=timeout)

    world.publisher._transfers._ask = ask
