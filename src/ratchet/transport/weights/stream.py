"""Buckets through a process group, one after another, and the trailer behind them: both sides.

The sending side consumes the trainer's parameters, and gathers a bucket while the last travels.
The receiving side produces buckets in an inbox and receives one while the one before is written.
Each holds two buckets at most. Runs on the threads of the links, and waits for the peers, until the
deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from ratchet.transport.weights.base import SendReport, WeightSource
from ratchet.transport.weights.buckets import host_bytes, pack
from ratchet.transport.weights.digest import digest_of, make_trailer, trailer_bytes, whole_digest
from ratchet.transport.weights.groups import Deadline, Group
from ratchet.transport.weights.inbox import Inbox
from ratchet.transport.weights.link import Link
from ratchet.transport.weights.plan import slots_by_bucket
from ratchet.types import WeightManifest


def send_buckets(
    link: Link, group: Group, manifest: WeightManifest, source: WeightSource, deadline: Deadline
) -> SendReport:
    """Send everything.

    Raises:
        TransferFailed: if an engine was lost, the deadline passed or the link was abandoned.
    """
    staging = link.staging(max(manifest.bucket_bytes))
    digests: list[bytes] = []
    gather_s = 0.0
    wait: Callable[[], None] = _nothing
    start = perf_counter()
    for index, slots in enumerate(slots_by_bucket(manifest)):
        link.check()
        begin = perf_counter()
        bucket = staging[index % len(staging)][: manifest.bucket_bytes[index]]
        pack(bucket, slots, source.read([slot.name for slot in slots]))
        digests.append(digest_of(host_bytes(bucket)))
        gather_s += perf_counter() - begin
        wait()
        wait = group.broadcast(bucket, deadline)
    link.check()
    trailer = group.allocate(trailer_bytes(manifest))
    data = bytearray(make_trailer(manifest, digests))
    trailer.copy_(torch.frombuffer(data, dtype=torch.uint8))
    wait_for_trailer = group.broadcast(trailer, deadline)
    wait()
    wait_for_trailer()
    return SendReport(
        digest=whole_digest(digests),
        num_bytes=sum(manifest.bucket_bytes),
        num_buckets=len(digests),
        gather_s=gather_s,
        move_s=perf_counter() - start - gather_s,
    )


def receive_buckets(
    link: Link, group: Group, manifest: WeightManifest, inbox: Inbox, deadline: Deadline
) -> None:
    """Receive everything, and hand it over as it comes.

    Raises:
        TransferFailed: if the trainer or a peer was lost, or the deadline passed.
    """
    staging = link.staging(max(manifest.bucket_bytes))
    trailer = group.allocate(trailer_bytes(manifest))
    wait_for_trailer: Callable[[], None] = _nothing
    for index, size in enumerate(manifest.bucket_bytes):
        inbox.wait_for_room(deadline)
        bucket = staging[index % len(staging)][:size]
        wait = group.broadcast(bucket, deadline)
        if index == len(manifest.bucket_bytes) - 1:  # begun together: one wake-up less
            wait_for_trailer = group.broadcast(trailer, deadline)
        wait()
        inbox.put_bucket(index, bucket)
    wait_for_trailer()
    inbox.put(bytes(host_bytes(trailer)))


def _nothing() -> None:
    pass
