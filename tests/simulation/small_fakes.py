"""What takes time in a small world: each part of it is a gate that an input opens.

The engine makes its first token at once and waits before each other; the model waits before each
half of a step. Weights travel as parcels on a lane of their own: an engine joins by one, and gets
them by another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tests.simulation.fakes import RecordingBackend
from tests.simulation.small_life import WEIGHTS, Life
from tests.simulation.weight_ends import SeenEngine
from tests.simulation.weights import FakeReceiver, Weights, Wire, digest_of

from ratchet.backends.rollout.fake import _completion, fake_token
from ratchet.errors import TransferFailed
from ratchet.transport.weights.base import LoadReport, SendReport
from ratchet.types import WeightManifest, WeightRoute


class GatedEngine(SeenEngine):
    """Generates the first token of a completion at once, and the others when it is let."""

    def __init__(self, life: Life) -> None:
        super().__init__()
        self._life = life
        self._num_started = 0

    async def _produce(
        self, prompt_ids: Any, params: Any, length: int, pause_s: float, future: Any
    ) -> None:
        number = self._num_started
        self._num_started += 1
        made = []
        for position in range(length):
            if position:
                await self._life.gate(f"generation {number}.{position}")
            version = await self._wait_for_version()
            made.append((*fake_token(self._weights, prompt_ids, params.seed, position), version))
            self._generated_tokens += 1
        if not future.done():
            future.set_result(_completion(made, "length"))


class GatedBackend(RecordingBackend):
    """Takes each half of a step when it is let."""

    def __init__(self, life: Life) -> None:
        super().__init__(size=4, seed=life.number)
        self._life = life

    async def forward_backward(self, groups: Any) -> Any:
        await self._life.gate(f"forward {self.num_batches}")
        return await super().forward_backward(groups)

    async def optimizer_step(self) -> Any:
        await self._life.gate(f"step {self.num_batches}")
        return await super().optimizer_step()


class MailedSender:
    """Sends weights as parcels, once every engine has joined or is lost."""

    def __init__(self, life: Life, wire: Wire, weights: Callable[[], Weights]) -> None:
        self._life = life
        self._wire = wire
        self._weights = weights
        self._num_transfers = 0
        self._groups: dict[str, str] = {}
        """of each engine of the transfer"""
        self._joined: dict[str, asyncio.Future[None]] = {}
        self._lost: dict[str, str] = {}

    def plan(
        self, term: int, version: int, step: int, engines: Sequence[str], *, catch_up: bool = False
    ) -> Any:
        weights = self._weights()
        known = self._wire.sent.setdefault(version, weights)
        assert np.array_equal(known, weights), f"version {version} names two sets of weights"
        transfer = f"{self._life.number}/{self._num_transfers}"
        self._num_transfers += 1
        self._groups = {engine: f"{transfer}/{engine}" for engine in engines}
        self._joined = {group: self._life.loop.create_future() for group in self._groups.values()}
        self._lost = {}
        routes = {
            engine: WeightRoute("fake", "none", "", 0, group, rank, 2, self._wire.timeout_s)
            for rank, (engine, group) in enumerate(self._groups.items(), start=1)
        }
        return WeightManifest(term, version, step, (), (), {}), routes

    async def send(self, manifest: WeightManifest) -> SendReport:
        weights = self._weights()
        digest = digest_of(weights)
        await asyncio.wait(self._joined.values(), timeout=self._wire.timeout_s / 2)
        for engine, group in self._groups.items():
            if not self._joined[group].done():
                self._lost[engine] = "it did not join"
            if engine not in self._lost:
                name = engine.split("/")[0]
                self._life.send(name, WEIGHTS, "weights", (group, weights, digest))
        if len(self._lost) == len(self._groups):
            raise TransferFailed(f"no engine got version {manifest.version}: {self._lost}")
        return SendReport(digest, weights.nbytes, 1, 0.0, 0.0, self._lost)

    def join(self, group: str) -> None:
        """Hear of an engine that waits."""
        if group in self._joined and not self._joined[group].done():
            self._joined[group].set_result(None)

    def leave(self, engine: str, reason: str) -> None:
        """Go on without an engine."""
        if engine in self._groups:
            self._lost[engine] = reason
            self.join(self._groups[engine])

    async def close(self) -> None:
        pass


class MailedReceiver(FakeReceiver):
    """Joins by a parcel, and gets the weights by one."""

    def __init__(self, life: Life, wire: Wire, trainer: str) -> None:
        super().__init__(wire)
        self._life = life
        self._trainer = trainer
        self._group = ""

    async def receive(
        self, manifest: WeightManifest, route: WeightRoute, sink: Any, mode: Any
    ) -> LoadReport:
        if self._waiting is not None:
            raise TransferFailed("this engine is still receiving an earlier version")
        self._waiting = self._life.loop.create_future()
        self._group = route.group
        self._life.send(self._trainer, WEIGHTS, "join", route.group)
        try:
            async with asyncio.timeout(route.timeout_s + 1):
                weights, digest = await self._waiting
            return await self._load(weights, digest, manifest, sink, mode)
        except TimeoutError:
            raise TransferFailed("nothing arrived") from None
        finally:
            self._waiting = None

    def arrive(self, group: str, weights: Weights, digest: str) -> None:
        """Take weights, if they are those that it waits for."""
        if self._waiting is not None and not self._waiting.done() and group == self._group:
            self._waiting.set_result((weights, digest))
