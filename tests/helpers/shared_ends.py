"""A ring in shared memory, its readers, and what passes from one to the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from tests.helpers.weights import make_tensors, specs_of

from ratchet.errors import TransferFailed
from ratchet.transport.weights.deadline import Deadline
from ratchet.transport.weights.finalize import Arrived
from ratchet.transport.weights.plan import make_manifest
from ratchet.transport.weights.shared import SharedRing, Sharing
from ratchet.transport.weights.shared_reader import SharedReader

MANIFEST = make_manifest(specs_of(make_tensors(1), {}), 2**17, term=1, version=1, step=1)
NUM_BUCKETS = len(MANIFEST.bucket_bytes)
TRAILER = bytes(range(16 * (NUM_BUCKETS + 1)))


class Taker:
    """An inbox whose engine keeps a copy of each bucket as soon as it may."""

    is_whole = False

    def __init__(self, rooms: int | None = None) -> None:
        self.rooms = threading.Semaphore(10**6 if rooms is None else rooms)
        self.buckets: list[torch.Tensor] = []
        self.keep: Callable[[torch.Tensor], torch.Tensor] = torch.clone
        self.trailer = b""
        self.took: dict[int, threading.Event] = {n: threading.Event() for n in range(NUM_BUCKETS)}

    def wait_for_room(self, deadline: Deadline) -> None:
        if not self.rooms.acquire(timeout=deadline.left_s):
            msg = "no room"
            raise TransferFailed(msg)

    def put_bucket(self, arrived: Arrived) -> None:
        self.took[len(self.buckets)].set()
        self.buckets.append(self.keep(arrived.bucket))

    def put_trailer(self, trailer: bytes) -> None:
        self.trailer = trailer


class Ends:
    """One ring and its readers, each on a thread."""

    def __init__(self) -> None:
        self.ring = SharedRing()
        self.pool = ThreadPoolExecutor(4)
        self.readers: dict[int, SharedReader] = {}
        self.number = 0

    def close(self) -> None:
        self.ring.close()
        self.pool.shutdown()
        for reader in self.readers.values():
            reader.leave()

    def open(
        self, takers: dict[int, Taker], absent: int | None = None, timeout_s: float = 20.0
    ) -> tuple[Sharing, dict[int, Future[None]]]:
        self.number += 1
        name = f"transfer-{self.number}"
        ranks = list(takers) if absent is None else [*takers, absent]
        self.ring.reserve(MANIFEST)
        sharing = self.ring.open(name, ranks)
        for rank in takers:
            reader = self.readers.setdefault(rank, SharedReader())
            reader.knock(self.ring.address, name, rank, Deadline(timeout_s))
        loads = {
            rank: self.pool.submit(
                self.readers[rank].receive, MANIFEST, taker, None, Deadline(timeout_s), nothing
            )
            for rank, taker in takers.items()
        }
        return sharing, loads


def nothing() -> None:
    pass


def values(number: int, index: int) -> torch.Tensor:
    size = MANIFEST.bucket_bytes[index]
    return torch.full((size,), (number * 31 + index * 7) % 256, dtype=torch.uint8)


def send(
    sharing: Sharing,
    number: int = 0,
    timeout_s: float = 20.0,
    check: Callable[[], None] = nothing,
    buckets: range = range(NUM_BUCKETS),
) -> None:
    for index in buckets:
        sharing.wait_for_room(index + 1, Deadline(timeout_s), check)
        sharing.slots[index % 2][: MANIFEST.bucket_bytes[index]].copy_(values(number, index))
        sharing.publish(index, index % 2, MANIFEST.bucket_bytes[index])
    if buckets.stop == NUM_BUCKETS:
        sharing.publish_trailer(NUM_BUCKETS, TRAILER)


def check_all(taker: Taker, number: int = 0) -> None:
    assert len(taker.buckets) == NUM_BUCKETS
    for index, bucket in enumerate(taker.buckets):
        assert torch.equal(bucket, values(number, index)), index
    assert taker.trailer == TRAILER
