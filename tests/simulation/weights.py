"""A weight transport without a network: the trainer's "w" reaches the engines after a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ratchet.backends.rollout.fake import NAME
from ratchet.errors import TransferFailed
from ratchet.transport.weights.base import LoadReport, SendReport
from ratchet.types import WeightManifest, WeightRoute

Weights = npt.NDArray[np.float32]


class Wire:
    """What both ends share; `sent` remembers the weights of every version for the tests."""

    def __init__(self, *, move_s: float = 0.5, load_s: float = 0.1) -> None:
        self.move_s = move_s
        self.load_s = load_s
        self.sent: dict[int, Weights] = {}
        self.arrivals: dict[str, asyncio.Future[Weights]] = {}
        self.lose: set[str] = set()
        """engines (by name) whose next transfer is lost"""


def digest_of(weights: Weights) -> str:
    return xxhash.xxh3_128_hexdigest(weights.tobytes())


class FakeSender:
    """Reads `weights()` when it sends."""

    def __init__(self, wire: Wire, weights: Callable[[], Weights]) -> None:
        self._wire = wire
        self._weights = weights
        self._groups: list[str] = []
        self._count = 0

    def plan(
        self, term: int, version: int, step: int, engines: Sequence[str]
    ) -> tuple[WeightManifest, Mapping[str, WeightRoute]]:
        self._count += 1
        routes = {}
        for rank, engine in enumerate(engines, start=1):
            group = f"{self._count}/{engine}"
            self._wire.arrivals[group] = asyncio.get_running_loop().create_future()
            routes[engine] = WeightRoute("fake", "none", "", 0, group, rank, len(engines) + 1, 60)
        self._groups = [route.group for route in routes.values()]
        return WeightManifest(term, version, step, (), (), {}), routes

    async def send(self, manifest: WeightManifest) -> SendReport:
        weights = self._weights()
        await asyncio.sleep(self._wire.move_s)
        self._wire.sent[manifest.version] = weights
        lost = [group for group in self._groups if group.split("/")[1] in self._wire.lose]
        for group in self._groups:
            if group not in lost:
                self._wire.arrivals.pop(group).set_result(weights)
        if lost:
            self._wire.lose.clear()
            raise TransferFailed(f"lost: {lost}")
        return SendReport(digest_of(weights), weights.nbytes, 1, 0.0, self._wire.move_s)

    async def close(self) -> None:
        pass


class FakeReceiver:
    """Waits for the arrival that its route names."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._waiting: asyncio.Future[Weights] | None = None

    async def receive(
        self, manifest: WeightManifest, route: WeightRoute, sink: Any, mode: Any
    ) -> LoadReport:
        self._waiting = self._wire.arrivals[route.group]
        weights = await self._waiting
        await sink.pause(mode)
        try:
            await sink.write({NAME: weights})
            await asyncio.sleep(self._wire.load_s)
            await sink.stamp(manifest.version)
        finally:
            await sink.resume()
        return LoadReport(digest_of(weights), 0.0, self._wire.load_s, self._wire.load_s)

    def abort(self, reason: str) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(TransferFailed(reason))

    async def close(self) -> None:
        pass
