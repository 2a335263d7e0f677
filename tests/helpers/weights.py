"""A trainer's parameters and an engine that record what is done to them."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch

from ratchet.errors import WeightsMismatch
from ratchet.transport.weights.base import TensorSpec
from ratchet.transport.weights.buckets import dtype_name, host_bytes, pack
from ratchet.transport.weights.digest import bucket_digest, digests_of, whole_digest
from ratchet.transport.weights.plan import make_manifest, slots_by_bucket
from ratchet.types import PauseMode, PolicyVersion, TensorSlot, WeightProbe

Tensors = dict[str, torch.Tensor]


def pack_all(
    bucket: torch.Tensor, slots: Sequence[TensorSlot], tensors: Sequence[torch.Tensor]
) -> None:
    """Pack every part, at once."""
    for parts in pack(bucket, slots, tensors):
        list(parts)


def make_tensors(seed: int, *, num_wide: int = 6, wide: int = 300) -> Tensors:
    """Return parameters of several dtypes and shapes, an empty one and a scalar among them."""
    rng = torch.Generator().manual_seed(seed)
    tensors = {
        f"layers.{n}.weight": torch.randn(wide, wide, generator=rng).to(torch.bfloat16)
        for n in range(num_wide)
    }
    tensors["embed.weight"] = torch.randn(97, wide, generator=rng)
    tensors["norm.weight"] = torch.randn(wide, generator=rng, dtype=torch.float64)
    tensors["steps"] = torch.tensor(seed)
    tensors["nothing"] = torch.zeros(0, 3, dtype=torch.bfloat16)
    tensors["mask"] = torch.rand(11, generator=rng) > 0.5
    return tensors


def specs_of(
    tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str]
) -> tuple[TensorSpec, ...]:
    own = [TensorSpec(name, dtype_name(t), tuple(t.shape)) for name, t in tensors.items()]
    tied = [
        TensorSpec(name, dtype_name(tensors[target]), tuple(tensors[target].shape), target)
        for name, target in aliases.items()
    ]
    return (*own, *tied)


def digest_of_tensors(tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> str:
    """Return the digest of a version by the book, beside the code under test's way of packing."""
    manifest = make_manifest(specs_of(tensors, {}), bucket_bytes, term=0, version=0, step=0)
    return whole_digest(
        [
            bucket_digest(digests_of(host_bytes(tensors[slot.name]) for slot in slots))
            for slots in slots_by_bucket(manifest)
        ]
    )


class FakeSource:
    """The trainer's model."""

    def __init__(self, tensors: Tensors, aliases: Mapping[str, str] | None = None) -> None:
        self.tensors = tensors
        self.aliases = dict(aliases or {})
        self.on_read: Callable[[Sequence[str]], None] = lambda names: None
        self.threads: set[str] = set()

    def specs(self) -> Sequence[TensorSpec]:
        return specs_of(self.tensors, self.aliases)

    def read(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        self.threads.add(threading.current_thread().name)
        self.on_read(names)
        return [self.tensors[name] for name in names]


class FakeSink:
    """An engine: a model in memory, a version, and a list of events."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        aliases: Mapping[str, str] | None = None,
        version: PolicyVersion | None = None,
    ) -> None:
        self.tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        self.aliases = dict(aliases or {})
        self.version = version
        self.paused = False
        self.events: list[str] = []
        self.fail_in: str | None = None
        """name of a method that raises"""
        self.fail_after = 0
        """calls of it that go well before"""
        self.on: dict[str, Callable[[], None]] = {}
        self.hold: dict[str, asyncio.Event] = {}
        """methods that wait for an event"""
        self.entered: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def specs(self) -> Sequence[TensorSpec]:
        return specs_of(self.tensors, self.aliases)

    async def pause(self, mode: PauseMode) -> None:
        self.paused = True
        await self._enter("pause")

    async def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.version = None
        await self._enter("write")
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)

    async def read(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        await self._enter("read")
        return [self.tensors[name] for name in names]

    async def stamp(self, version: PolicyVersion) -> None:
        await self._enter("stamp")
        self.version = version

    async def resume(self) -> None:
        self.events.append("resume")
        self.paused = False

    async def _enter(self, method: str) -> None:
        self.events.append(method)
        self.entered[method].set()
        if method in self.hold:
            await self.hold[method].wait()
        if method == self.fail_in:
            if self.fail_after == 0:
                msg = f"the engine fails in {method}"
                raise RuntimeError(msg)
            self.fail_after -= 1
        if method in self.on:
            self.on[method]()
        await asyncio.sleep(0)


class AdoptingFakeSink(FakeSink):
    """An engine that takes tensors as they are, in the place of its own."""

    adopts: torch.device | None = torch.device("cpu")

    async def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.version = None
        await self._enter("adopt")
        self.tensors.update(tensors)


class ProbedFakeSink(FakeSink):
    """An engine that gives no weights back, and computes `computes` with what it holds."""

    computes: WeightProbe | None = None
    expected: WeightProbe | None = None

    def expect(self, probe: WeightProbe | None) -> None:
        self.events.append("expect")
        self.expected = probe

    async def read(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        raise AssertionError(names)

    async def stamp(self, version: PolicyVersion) -> None:
        if self.expected not in {None, self.computes}:
            self.events.append("refused")
            msg = "it computes something else"
            raise WeightsMismatch(msg)
        await super().stamp(version)
