"""An engine and weights on their way into it, each of whose moves is written down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch
from tests.helpers.weights import AdoptingFakeSink, FakeSink, make_tensors, pack_all, specs_of

from ratchet.errors import TransferFailed
from ratchet.transport.weights.base import LoadReport
from ratchet.transport.weights.digest import make_trailer
from ratchet.transport.weights.finalize import Arrived, finalize
from ratchet.transport.weights.plan import check_specs, make_manifest, slots_by_bucket


class Stage:
    """An engine and arrivals that write into one list of events."""

    room = 2

    def __init__(
        self, bucket_bytes: int, *, adopts: bool = False, kind: type[FakeSink] | None = None
    ) -> None:
        self.tensors = make_tensors(1)
        specs = specs_of(self.tensors, {})
        self.manifest = make_manifest(specs, bucket_bytes, term=1, version=7, step=7)
        self.num_buckets = len(self.manifest.bucket_bytes)
        kind = kind or (AdoptingFakeSink if adopts else FakeSink)
        self.sink = kind(self.tensors, version=6)
        self.events = self.sink.events
        self.owners = check_specs(self.manifest, self.sink.specs())
        self.buckets: list[Arrived] = []
        for slots, size in zip(
            slots_by_bucket(self.manifest), self.manifest.bucket_bytes, strict=True
        ):
            bucket = torch.zeros(size, dtype=torch.uint8)
            pack_all(bucket, slots, [self.tensors[slot.name] for slot in slots])
            self.buckets.append(Arrived.inspect(bucket, slots))
        self.digests = [arrived.digest for arrived in self.buckets]
        self.lost_at: int | None = None
        self.num_taken = 0
        self.num_held = 0
        self.most_held = 0

    async def bucket(self) -> Arrived:
        self.events.append("arrive")
        if self.num_taken == self.lost_at:
            msg = "the trainer is gone"
            raise TransferFailed(msg)
        self.num_taken += 1
        self.num_held += 1
        self.most_held = max(self.most_held, self.num_held)
        return self.buckets[self.num_taken - 1]

    async def trailer(self) -> bytes:
        self.events.append("trailer")
        return make_trailer(self.manifest, self.digests)

    def release(self, arrived: Arrived) -> None:
        self.num_held -= 1

    def hand_over(self) -> Callable[[], None]:
        self.events.append("hand over")
        return lambda: self.events.append("adopted")

    def load(self, *, verify: bool = True, commit: Callable[[], None] | None = None) -> LoadReport:
        def committed() -> None:
            self.events.append("commit")

        return asyncio.run(
            finalize(
                self.manifest,
                self.owners,
                self,
                self.sink,
                "retract",
                verify=verify,
                commit=commit or committed,
            )
        )
