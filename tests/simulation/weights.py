"""A weight transport without a network: the trainer's "w" reaches the engines after a while.

As with the real one, the sender waits for every engine to join, but not for ever, and a lost engine
fails its own part alone. `Wire` is what both ends share, and where faults are put in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ratchet.backends.rollout.fake import NAME
from ratchet.errors import TransferFailed, WeightsMismatch
from ratchet.transport.weights.base import LoadReport, SendReport
from ratchet.types import WeightManifest, WeightRoute

Weights = npt.NDArray[np.float32]


@dataclass(eq=False)
class Passage:
    """One engine's part of one transfer."""

    engine: str
    joined: asyncio.Future[None]
    arrival: asyncio.Future[tuple[Weights, str]]
    """what arrives, and the digest of what was sent"""
    planned: str = ""
    """the engine, name and incarnation"""


class Wire:
    """What both ends share; `sent` remembers the weights of every version for the tests."""

    def __init__(self, *, move_s: float = 0.5, load_s: float = 0.1, timeout_s: float = 60) -> None:
        self.move_s = move_s
        self.load_s = load_s
        self.timeout_s = timeout_s
        self.sent: dict[int, Weights] = {}
        self.passages: dict[str, Passage] = {}
        self.lose: set[str] = set()
        """engines (by name) whose next transfer is lost"""
        self.corrupt: set[str] = set()
        """engines whose next weights arrive changed"""
        self.slow: dict[str, float] = {}
        """seconds that the next transfer to an engine takes on top"""


def digest_of(weights: Weights) -> str:
    return xxhash.xxh3_128_hexdigest(weights.tobytes())


class FakeSender:
    """Reads `weights()` when it sends."""

    def __init__(self, wire: Wire, weights: Callable[[], Weights]) -> None:
        self._wire = wire
        self._weights = weights
        self._passages: list[Passage] = []
        self._gone: dict[str, str] = {}

    def plan(
        self, term: int, version: int, step: int, engines: Sequence[str], *, catch_up: bool = False
    ) -> tuple[WeightManifest, Mapping[str, WeightRoute]]:
        assert not catch_up or len(engines) == 1
        loop = asyncio.get_running_loop()
        weights = self._weights()
        known = self._wire.sent.setdefault(version, weights)
        assert np.array_equal(known, weights), f"version {version} names two sets of weights"
        routes, self._passages, self._gone = {}, [], {}
        for rank, engine in enumerate(engines, start=1):
            name = engine.split("/")[0]
            passage = Passage(name, loop.create_future(), loop.create_future(), engine)
            group = f"{len(self._wire.passages)}/{engine}"
            self._wire.passages[group] = passage
            self._passages.append(passage)
            routes[engine] = WeightRoute(
                "fake", "none", "", 0, group, rank, len(engines) + 1, self._wire.timeout_s
            )
        return WeightManifest(term, version, step, (), (), {}), routes

    async def send(self, manifest: WeightManifest) -> SendReport:
        wire, passages, gone = self._wire, self._passages, self._gone
        weights = self._weights()
        digest = digest_of(weights)
        deadline = asyncio.get_running_loop().time() + wire.timeout_s
        await asyncio.wait([p.joined for p in passages], timeout=wire.timeout_s / 2)
        for passage in passages:
            if not passage.joined.done():
                gone[passage.planned] = "it did not join"
        here = [p for p in passages if p.planned not in gone]
        await asyncio.sleep(wire.move_s)
        for passage in sorted(here, key=lambda p: wire.slow.get(p.engine, 0.0)):
            left_s = max(0.0, deadline - asyncio.get_running_loop().time())
            await asyncio.sleep(min(wire.slow.pop(passage.engine, 0.0), left_s + 0.001))
            if passage.engine in wire.lose:
                wire.lose.discard(passage.engine)
                gone[passage.planned] = "it was lost on the way"
            elif asyncio.get_running_loop().time() > deadline:
                gone[passage.planned] = "it stood still"
            elif passage.arrival.done():
                gone[passage.planned] = "it gave up"
            elif passage.planned not in gone:
                self._arrive(passage, weights, digest)
        if len(gone) == len(passages):
            raise TransferFailed(f"no engine got version {manifest.version}: {gone}")
        return SendReport(digest, weights.nbytes, 1, 0.0, wire.move_s, gone)

    def leave(self, engine: str, reason: str) -> None:
        for passage in self._passages:
            if passage.planned == engine and not passage.arrival.done():
                self._gone[engine] = reason
                if not passage.joined.done():
                    passage.joined.set_result(None)

    def _arrive(self, passage: Passage, weights: Weights, digest: str) -> None:
        corrupt = passage.engine in self._wire.corrupt
        self._wire.corrupt.discard(passage.engine)
        passage.arrival.set_result((weights + np.float32(corrupt), digest))

    async def close(self) -> None:
        pass


class FakeSnapshot:
    """Takes a while to copy `weights()`."""

    def __init__(self, weights: Callable[[], Weights], copy_s: float = 0.2) -> None:
        self._weights = weights
        self._copy_s = copy_s
        self._newest: tuple[int, Weights] | None = None
        self._reading: Weights | None = None

    async def take(self, version: int) -> None:
        before, self._newest = self._weights(), None
        await asyncio.sleep(self._copy_s)
        assert np.array_equal(self._weights(), before), "the weights changed under a copy"
        self._newest = version, before.copy()

    @contextmanager
    def reading(self, version: int) -> Iterator[None]:
        assert self._newest is not None
        assert self._newest[0] == version
        assert self._reading is None
        self._reading = self._newest[1]
        try:
            yield
        finally:
            self._reading = None

    def weights(self) -> Weights:
        assert self._reading is not None, "no version is being read"
        return self._reading


class FakeReceiver:
    """Waits for the arrival that its route names."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._waiting: asyncio.Future[tuple[Weights, str]] | None = None

    async def receive(
        self, manifest: WeightManifest, route: WeightRoute, sink: Any, mode: Any
    ) -> LoadReport:
        if self._waiting is not None:
            raise TransferFailed("this engine is still receiving an earlier version")
        passage = self._wire.passages[route.group]
        self._waiting = passage.arrival
        if not passage.joined.done():
            passage.joined.set_result(None)
        try:
            async with asyncio.timeout(route.timeout_s + 1):
                weights, digest = await self._waiting
            return await self._load(weights, digest, manifest, sink, mode)
        except TimeoutError:
            raise TransferFailed(f"nothing arrived in {route.timeout_s + 1} s") from None
        finally:
            self._waiting = None

    async def _load(
        self, weights: Weights, digest: str, manifest: WeightManifest, sink: Any, mode: Any
    ) -> LoadReport:
        await sink.pause(mode)
        try:
            await sink.write({NAME: weights})
            await asyncio.sleep(self._wire.load_s)
            if digest_of(weights) != digest:
                raise WeightsMismatch(f"version {manifest.version}: the digest differs")
            await sink.stamp(manifest.version)
        finally:
            await sink.resume()
        return LoadReport(digest_of(weights), 0.0, self._wire.load_s, self._wire.load_s)

    def abort(self, reason: str) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(TransferFailed(reason))

    async def close(self) -> None:
        pass
