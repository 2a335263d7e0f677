"""Both ends of the product's weight transport in a world, as they are, but for their threads.

A trainer's vector travels as several parameters in several buckets, each of which differs from
version to version, so that an engine that has mixed two makes tokens of neither. The engine behind
the product's receiver takes its time and fails where it is told to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from tests.simulation import threads
from tests.simulation.loop import current_process

from ratchet.backends.rollout.fake import NAME, FakeEngine
from ratchet.backends.training.snapshot import Snapshot
from ratchet.config import WeightsConfig
from ratchet.errors import WeightsMismatch
from ratchet.transport.weights.base import LoadReport, TensorSpec
from ratchet.transport.weights.plan import ALIGNMENT
from ratchet.transport.weights.receiver import Receiver
from ratchet.transport.weights.sender import Sender
from ratchet.types import PauseMode, PolicyVersion, WeightManifest, WeightRoute

if TYPE_CHECKING:
    from tests.simulation.fabric import Fabric, Failure

Weights = npt.NDArray[np.float32]

NUM_PARTS = 3
"""Parameters that travel."""
PART = 4
"""Numbers in each."""
PART_MIB = ALIGNMENT / 2**20
"""What each takes in a bucket."""
_DAMAGE = "the device of the engine is lost"


def spread(weights: Weights) -> Weights:
    """Return what an engine holds: parts that all change when one number does."""
    return np.concatenate([weights + np.float32(part) for part in range(NUM_PARTS)])


class Source:
    """The trainer's parameters; each takes a while to read, and may be another by then."""

    def __init__(self, weights: Callable[[], Weights], read_s: float) -> None:
        self._weights = weights
        self._read_s = read_s

    def specs(self) -> Sequence[TensorSpec]:
        return [TensorSpec(f"{NAME}.{part}", "float32", (PART,)) for part in range(NUM_PARTS)]

    def read(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        if threads.current_thread() is not None:
            threads.sleep(self._read_s)
        weights = self._weights()
        return [torch.from_numpy(weights + np.float32(int(name.split(".")[1]))) for name in names]


class RecordingSender(Sender):
    """Remembers what each version was when it was planned."""

    def __init__(
        self, fabric: Fabric, config: WeightsConfig, source: Any, weights: Callable[[], Weights]
    ) -> None:
        division: Any = config.transport
        super().__init__(division, config, "127.0.0.1", source)
        self._fabric = fabric
        self._weights = weights

    def plan(
        self, term: int, version: int, step: int, engines: Sequence[str], *, catch_up: bool = False
    ) -> tuple[WeightManifest, Mapping[str, WeightRoute]]:
        weights = spread(self._weights())
        known = self._fabric.sent.setdefault(version, weights)
        assert np.array_equal(known, weights), f"version {version} names two sets of weights"
        return super().plan(term, version, step, engines, catch_up=catch_up)


class HeldSnapshot(Snapshot):
    """Takes a while to copy, and can be looked into."""

    def __init__(self, source: Source, copy_s: float = 0.2) -> None:
        super().__init__(source)
        self._copy_s = copy_s

    async def take(self, version: int) -> None:
        before = self._source.read([f"{NAME}.0"])[0]
        await asyncio.sleep(self._copy_s)
        await super().take(version)
        after = self._source.read([f"{NAME}.0"])[0]
        assert torch.equal(before, after), "the weights changed under a copy"

    def weights(self) -> Weights:
        """What is being read."""
        return np.asarray(self.read([f"{NAME}.0"])[0])


class SeenEngine(FakeEngine):
    """Remembers each version that it was stamped with, and the weights that it held then."""

    def __init__(self, **script: Any) -> None:
        self._adopted: Sequence[torch.Tensor] = ()
        super().__init__(**script)
        self.stamped: list[tuple[int, Weights]] = []

    async def stamp(self, version: int) -> None:
        await super().stamp(version)
        self.stamped.append((version, self.weights))

    def adopt(self, tensors: Sequence[torch.Tensor]) -> None:
        """Generate with what is in this memory, now and later; quarantined until `stamp`."""
        self._change(version=None)
        self._adopted = tensors

    @property
    def _weights(self) -> Weights:
        if not self._adopted:
            return self._own
        return np.concatenate([tensor.numpy() for tensor in self._adopted])

    @_weights.setter
    def _weights(self, weights: Weights) -> None:
        self._adopted, self._own = (), weights


class Sink:
    """The engine, as the receiver sees it."""

    def __init__(self, engine: SeenEngine, fabric: Fabric, load_s: float, *, adopts: bool) -> None:
        self.adopts = torch.device("cpu") if adopts else None
        self._fabric = fabric
        self._engine = engine
        self._load_s = load_s

    @property
    def version(self) -> PolicyVersion | None:
        return self._engine.version

    def specs(self) -> Sequence[TensorSpec]:
        return [TensorSpec(f"{NAME}.{part}", "float32", (PART,)) for part in range(NUM_PARTS)]

    async def pause(self, mode: PauseMode) -> None:
        self._fail("pause")
        await self._engine.pause(mode)

    async def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._fail("write")
        weights = self._engine.weights
        forgets = self._takes("forget")
        for name, tensor in tensors.items():
            part = int(name.split(".")[1])
            if not forgets:
                weights[part * PART : (part + 1) * PART] = tensor.numpy()
        await self._engine.write({NAME: weights})
        await asyncio.sleep(self._load_s / NUM_PARTS)

    async def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._fail("write")
        if not self._takes("forget"):
            self._engine.adopt([tensors[spec.name] for spec in self.specs()])
        await asyncio.sleep(self._load_s)

    async def read(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        self._fail("read")
        parts = [int(name.split(".")[1]) for name in names]
        if self._engine._adopted:
            return [self._engine._adopted[part] for part in parts]
        weights = self._engine.weights
        return [torch.from_numpy(weights[part * PART : (part + 1) * PART]) for part in parts]

    async def stamp(self, version: PolicyVersion) -> None:
        self._fail("stamp")
        await self._engine.stamp(version)

    async def resume(self) -> None:
        await self._engine.resume()

    def _takes(self, call: str) -> Failure | None:
        """Return a failure that waits for this call."""
        process = current_process.get()
        assert process is not None
        failure = self._fabric.failures.get(process.name)
        if failure is None or failure.call != call:
            return None
        self._fabric.num_damaged += call == "forget"
        return self._fabric.failures.pop(process.name)

    def _fail(self, call: str) -> None:
        failure = self._takes(call)
        if failure is not None:
            raise (WeightsMismatch if failure.known else RuntimeError)(_DAMAGE)


class SeenReceiver(Receiver):
    """Tells the network when it takes part in a transfer."""

    def __init__(self, fabric: Fabric, config: WeightsConfig, sink: Sink) -> None:
        super().__init__(config.transport, config)
        self.sink = sink
        self._fabric = fabric

    @property
    def loads(self) -> bool:
        """A load is under way."""
        return self._scope is not None

    async def receive(
        self, manifest: WeightManifest, route: WeightRoute, sink: Any, mode: PauseMode
    ) -> LoadReport:
        self._fabric.begin(current_process.get())
        try:
            return await super().receive(manifest, route, self.sink, mode)
        finally:
            self._fabric.end(current_process.get())


def in_memory(config: WeightsConfig) -> WeightsConfig:
    """Return the section for a world: everything goes through groups in memory."""
    return config.model_copy(update={"backend": "gloo", "shared_memory": False})
