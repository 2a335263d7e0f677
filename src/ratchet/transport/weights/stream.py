"""One round of a transfer through a process group, one bucket after another and the trailer behind
them: both sides.

The sending side consumes buckets that are gathered while the last one travels, the receiving side
produces buckets in an inbox and receives one while the one before is written. All pieces of a
bucket are under way at once, and digests follow them. Runs on the threads of the links. Each waits
for its peers, for one bucket never longer than `limit_s`: whoever takes longer has left the round,
as far as the others are concerned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ratchet.transport.weights.buckets import host_bytes
from ratchet.transport.weights.deadline import Deadline
from ratchet.transport.weights.digest import trailer_bytes
from ratchet.transport.weights.finalize import Arrived
from ratchet.transport.weights.gathering import Gathering
from ratchet.transport.weights.groups import Group
from ratchet.transport.weights.inbox import Inbox
from ratchet.transport.weights.link import Link
from ratchet.transport.weights.pieces import pieces_of
from ratchet.transport.weights.plan import slots_by_bucket
from ratchet.types import WeightManifest


def send_round(
    link: Link,
    group: Group,
    gathering: Gathering,
    point: str,
    first: int,
    deadline: Deadline,
    limit_s: float,
) -> None:
    """Send all parts from `first` on.

    Raises:
        TransferFailed: if an engine was lost, a bucket took too long or the link was abandoned.
    """
    wait_for_trailer: Callable[[], None] | None = None
    for part in range(first, gathering.num_buckets):
        with gathering.bucket(point, part, deadline) as gathered:
            link.check()
            waits = [
                group.move(gathered.pieces[number], deadline.within(limit_s))
                for number in gathering.coming(gathered, deadline)
            ]
            if part == gathering.num_buckets - 1:
                wait_for_trailer = _send_trailer(group, gathering, deadline.within(limit_s))
            for wait in waits:
                wait()
    link.check()
    if wait_for_trailer is None:
        wait_for_trailer = _send_trailer(group, gathering, deadline.within(limit_s))
    wait_for_trailer()


def _send_trailer(group: Group, gathering: Gathering, deadline: Deadline) -> Callable[[], None]:
    data = bytearray(gathering.trailer())
    trailer = group.allocate(len(data))
    trailer.copy_(torch.frombuffer(data, dtype=torch.uint8))
    return group.move(trailer, deadline)


def receive_round(
    link: Link,
    group: Group,
    manifest: WeightManifest,
    inbox: Inbox,
    first: int,
    deadline: Deadline,
    limit_s: float,
    large: int,
) -> None:
    """Receive all parts from `first` on, and hand over those that the inbox has not had yet: a
    round begins with the first part that any of its engines lacks. `large` is that of the trainer.

    Raises:
        TransferFailed: if the trainer or a peer was lost, or a bucket took too long.
        EngineStuck: if the engine took too long.
    """
    staging = link.staging(inbox.staging, group.device)
    trailer = group.allocate(trailer_bytes(manifest))
    buckets = slots_by_bucket(manifest)
    wait_for_trailer: Callable[[], None] | None = None
    for part in range(first, len(buckets)):
        num_bytes = manifest.bucket_bytes[part]
        has_room = part >= inbox.has or not inbox.is_whole
        if has_room:
            inbox.wait_for_room(deadline.within(limit_s))
            bucket = staging[inbox.has % len(staging)][:num_bytes]
        else:  # all the memory is spoken for
            bucket = group.allocate(num_bytes)
        arrived: Arrived | None = None
        try:
            limit = deadline.within(limit_s)
            pieces = [(0, num_bytes)]
            if group.device.type == "cpu":
                pieces = [piece[:2] for piece in pieces_of(buckets[part], num_bytes, large)]
            waits = [group.move(bucket[start:end], limit) for start, end in pieces]
            if part == len(buckets) - 1:  # begun together: one wake-up less
                wait_for_trailer = group.move(trailer, deadline.within(limit_s))
            ends = _arriving([end for _, end in pieces], waits)
            if part == inbox.has:
                arrived = Arrived.inspect(bucket, buckets[part], ends)
            else:
                list(ends)
        finally:
            if has_room and arrived is None:
                inbox.return_room()
        if arrived is not None:
            inbox.put_bucket(arrived)
    if wait_for_trailer is None:
        wait_for_trailer = group.move(trailer, deadline.within(limit_s))
    wait_for_trailer()
    inbox.put_trailer(bytes(host_bytes(trailer)))


def _arriving(ends: Sequence[int], waits: Sequence[Callable[[], None]]) -> Iterator[int]:
    """Yield the end of each piece of a bucket when it has arrived."""
    for end, wait in zip(ends, waits, strict=True):
        wait()
        yield end
