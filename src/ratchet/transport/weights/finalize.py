"""From bytes that arrived to a version that generates: one function for every transport.

Consumes the buckets and the trailer that a transport hands over, produces a stamped engine. Waits
for arrivals, unblocked by the transport, and for the engine. The order is pause, write, verify,
stamp, resume. The pause begins when everything is here, or as much as the staging memory takes: a
model that it takes as a whole is verified before the engine is touched at all, and an engine that
can adopt it does so in the place of a copy. One that cannot be read back proves in the stamp what
it holds, by what it computes. A failure before the first write leaves the engine with
its old version, a later one leaves it quarantined; either way it is resumed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ratchet.errors import WeightsMismatch
from ratchet.transport.weights.base import AdoptingSink, LoadReport, ProbedSink, WeightSink
from ratchet.transport.weights.buckets import host_bytes, view
from ratchet.transport.weights.digest import (
    bucket_digest,
    check_trailer,
    digest_as_it_comes,
    digest_of,
    whole_digest,
)
from ratchet.transport.weights.plan import slots_by_bucket
from ratchet.types import PauseMode, TensorSlot, WeightManifest, WeightProbe

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class Arrived(NamedTuple):
    """A bucket in staging memory."""

    bucket: torch.Tensor
    """uint8; belongs to the load until it is released"""
    digest: bytes
    slot_digests: tuple[bytes, ...]
    """one per slot"""

    @classmethod
    def inspect(
        cls, bucket: torch.Tensor, slots: Sequence[TensorSlot], ends: Iterable[int] = ()
    ) -> Arrived:
        """Compute the digests of what arrives, as it does; not on the event loop.

        Args:
            bucket: takes it.
            slots: what lies in it, by offset.
            ends: see `digest_as_it_comes`; nothing if all of it is there.
        """
        if bucket.device.type != "cpu":
            ends = list(ends)  # one copy to the host for all
        digests = digest_as_it_comes(host_bytes(bucket), slots, chain(ends, [len(bucket)]))
        return cls(bucket, bucket_digest(digests), digests)


class Arrivals(Protocol):
    """What a transport hands over. At most `room` buckets are out at once."""

    room: int

    async def bucket(self) -> Arrived:
        """Return the next bucket.

        Raises:
            TransferFailed: if there will be none.
        """
        ...

    async def trailer(self) -> bytes:
        """Return what follows the last bucket.

        Raises:
            TransferFailed: if there will be none.
        """
        ...

    def release(self, arrived: Arrived) -> None:
        """Give staging memory back for a bucket to come."""
        ...

    def hand_over(self) -> Callable[[], None]:
        """Part with the memory of a whole model; call the result when the engine has adopted it."""
        ...


async def finalize(
    manifest: WeightManifest,
    owners: Mapping[str, tuple[str, ...]],
    arrivals: Arrivals,
    sink: WeightSink,
    mode: PauseMode,
    *,
    verify: bool,
    commit: Callable[[], None],
) -> LoadReport:
    """Take one version into an engine.

    Args:
        manifest: the plan of the transfer.
        owners: what `plan.check_specs` returned for this engine.
        arrivals: the buckets, in order.
        sink: the engine.
        mode: how it pauses.
        verify: read the engine's own parameters back and compare them with what was sent; or, where
            they cannot be read, what they compute with what the trainer's model computes.
        commit: called once, right before the stamp. The transport raises here if the transfer was
            given up meanwhile, and from here on lets the load run to its end.

    Raises:
        TransferFailed: from the arrivals or from `commit`.
        WeightsMismatch: if what arrived, or what the engine holds, is not what was sent.
    """
    return await _Load(manifest, owners, arrivals, sink).run(mode, verify=verify, commit=commit)


def proof_of(manifest: WeightManifest) -> WeightProbe:
    """Return what proves the weights of an engine that cannot be read back.

    Raises:
        WeightsMismatch: if they came without.
    """
    if manifest.probe is None:
        msg = (
            f"the weights of version {manifest.version} came without a probe, and this engine"
            " cannot be read back: nothing would show what it holds. Train with a backend that"
            " computes one, or set weights.verify = false"
        )
        raise WeightsMismatch(msg)
    return manifest.probe


class _Load:
    """One run of `finalize`."""

    def __init__(
        self,
        manifest: WeightManifest,
        owners: Mapping[str, tuple[str, ...]],
        arrivals: Arrivals,
        sink: WeightSink,
    ) -> None:
        self._manifest = manifest
        self._buckets = slots_by_bucket(manifest)
        self._owners = owners
        self._arrivals = arrivals
        self._sink = sink
        self._staged: deque[tuple[Arrived, dict[str, torch.Tensor]]] = deque()
        """buckets that the engine has not yet, and its own parameters as they lie in them"""
        self._digests: list[bytes] = []
        self._slot_digests: list[tuple[bytes, ...]] = []
        self._move_s = 0.0
        self._now = asyncio.get_running_loop().time

    async def run(self, mode: PauseMode, *, verify: bool, commit: Callable[[], None]) -> LoadReport:
        start = self._now()
        if isinstance(self._sink, ProbedSink):
            self._sink.expect(proof_of(self._manifest) if verify else None)
            verify = False
        await self._stage(self._arrivals.room)
        pause = self._now()
        try:
            await self._sink.pause(mode)
            if isinstance(self._sink, AdoptingSink) and self._can_adopt(self._sink):
                await self._adopt(self._sink, verify=verify)
            else:
                await self._copy(verify=verify)
            commit()
            await self._sink.stamp(self._manifest.version)
        finally:
            await _resume(self._sink)
        end = self._now()
        return LoadReport(
            digest=whole_digest(self._digests),
            move_s=self._move_s,
            load_s=end - start - self._move_s,
            paused_s=end - pause,
        )

    async def _stage(self, limit: int) -> None:
        """Wait for up to `limit` more buckets; with the last one comes the trailer, checked
        here.
        """
        start = self._now()
        for _ in range(min(limit, len(self._buckets) - len(self._digests))):
            arrived = await self._arrivals.bucket()
            slots = self._buckets[len(self._digests)]
            tensors = {
                name: view(arrived.bucket, slot)
                for slot in slots
                for name in self._owners[slot.name]
            }
            self._staged.append((arrived, tensors))
            self._digests.append(arrived.digest)
            self._slot_digests.append(arrived.slot_digests)
        if len(self._digests) == len(self._buckets):
            check_trailer(self._manifest, await self._arrivals.trailer(), self._digests)
        self._move_s += self._now() - start

    def _can_adopt(self, sink: AdoptingSink) -> bool:
        """Return whether the engine can take what is staged for its own: all of it lies in memory
        of the right kind, and no two of its parameters would lie in one place.
        """
        return (
            len(self._staged) == len(self._buckets)
            and all(arrived.bucket.device == sink.adopts for arrived, _ in self._staged)
            and all(len(names) <= 1 for names in self._owners.values())
        )

    async def _adopt(self, sink: AdoptingSink, *, verify: bool) -> None:
        """Hand the staged memory over. What it holds was verified there, so nothing but whether the
        engine generates with it is left to see.
        """
        tensors: dict[str, torch.Tensor] = {}
        for _, each in self._staged:
            tensors |= each
        adopted = self._arrivals.hand_over()
        await sink.adopt(tensors)
        if verify:
            held = await sink.read(list(tensors))
            for (name, tensor), own in zip(tensors.items(), held, strict=True):
                if not _is_same_memory(own, tensor):
                    raise self._differs(name)
        adopted()  # not sooner: what the engine may still generate with is not received into

    async def _copy(self, *, verify: bool) -> None:
        for _ in self._buckets:
            if not self._staged:
                await self._stage(1)
            await self._write()
        if verify:
            await self._verify()

    async def _write(self) -> None:
        arrived, tensors = self._staged.popleft()
        await self._sink.write(tensors)
        self._arrivals.release(arrived)

    async def _verify(self) -> None:
        """Read the engine's parameters back, tied and untied, and compare them with what was
        sent.
        """
        for slots, digests in zip(self._buckets, self._slot_digests, strict=True):
            expected = {
                name: digest
                for slot, digest in zip(slots, digests, strict=True)
                for name in self._owners[slot.name]
            }
            tensors = await self._sink.read(list(expected))
            compare = partial(self._compare, expected, tensors)
            await asyncio.to_thread(compare)  # noqa: TID251 - reads gigabytes

    def _compare(self, expected: Mapping[str, bytes], tensors: Sequence[torch.Tensor]) -> None:
        for (name, digest), tensor in zip(expected.items(), tensors, strict=True):
            if digest_of(host_bytes(tensor)) != digest:
                raise self._differs(name)

    def _differs(self, name: str) -> WeightsMismatch:
        return WeightsMismatch(
            f"after loading version {self._manifest.version}, {name} at the engine is not what the"
            " trainer sent"
        )


def _is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.data_ptr(), a.dtype, a.shape, a.stride()) == (
        b.data_ptr(),
        b.dtype,
        b.shape,
        b.stride(),
    )


async def _resume(sink: WeightSink) -> None:
    """Resume even if this task is cancelled meanwhile."""
    resumed = asyncio.ensure_future(sink.resume())  # noqa: TID251 - outlives its cancelled load
    await asyncio.shield(resumed)
