"""A small copy of a weight transport, for small worlds and for tests of a rollout actor alone.

The random worlds run the product's own (`weight_ends.py`). `Wire` is what both ends share.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ratchet.backends.rollout.fake import NAME
from ratchet.errors import TransferFailed, WeightsMismatch
from ratchet.transport.weights.base import LoadReport
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


def digest_of(weights: Weights) -> str:
    return xxhash.xxh3_128_hexdigest(weights.tobytes())


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
