"""One round of a transfer through a process group, one bucket after another and the trailer behind
them: both sides.

The sending side consumes buckets that are gathered while the last one travels, the receiving side
produces buckets in an inbox and receives one while the one before is written. All pieces of a
bucket are under way at once, the next bucket is begun before the last of them has arrived, and
digests follow them. Runs on the threads of the links. Each waits for its peers, for one bucket
never longer than `limit_s`: whoever takes longer has left the round, as far as the others are
concerned.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from ratchet.transport.weights.buckets import host_bytes
from ratchet.transport.weights.digest import trailer_bytes
from ratchet.transport.weights.finalize import Arrived
from ratchet.transport.weights.gathering import Gathering
from ratchet.transport.weights.groups import Deadline, Group
from ratchet.transport.weights.inbox import Inbox
from ratchet.transport.weights.link import Link
from ratchet.transport.weights.pieces import Piece, pieces_of
from ratchet.transport.weights.plan import slots_by_bucket
from ratchet.types import TensorSlot, WeightManifest


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
    ends: list[Callable[[], None]] = []

    def send(part: int, look_ahead: Callable[[], None]) -> Generator[None]:
        with gathering.bucket(point, part, deadline) as gathered:
            link.check()
            limit = deadline.within(limit_s)
            waits = [group.move(piece, limit) for piece in gathered.pieces]
            if part == gathering.num_buckets - 1:
                ends.append(_send_trailer(group, gathering, limit))
            yield
            *most, last = waits
            for wait in most:
                wait()
            if most:
                look_ahead()
            last()

    parts = range(first, gathering.num_buckets)
    _move_all(parts, send, lambda _: not gathering.has_others(point))
    link.check()
    if not ends:  # everybody has all buckets
        ends.append(_send_trailer(group, gathering, deadline.within(limit_s)))
    ends.pop()()


def _move_all(
    parts: range,
    move: Callable[[int, Callable[[], None]], Generator[None]],
    may_overlap: Callable[[int], bool],
) -> None:
    """Move one bucket after another, and begin one, where it may be, when all but the last piece of
    the one before has arrived: the wire would else stand still in between. Not sooner, as the time
    that a bucket has begins there.

    Args:
        parts: the buckets.
        move: begins a bucket up to its `yield`, and waits for it after that; before it does so for
            the last of several pieces, it calls what it is given.
        may_overlap: whether a bucket may be begun then.
    """
    begun: list[Generator[None]] = []
    with ExitStack() as stack:

        def begin(part: int) -> None:
            bucket = move(part, partial(look_ahead, part + 1))
            stack.callback(bucket.close)
            next(bucket)
            begun.append(bucket)

        def look_ahead(part: int) -> None:
            if part in parts and may_overlap(part):
                begin(part)

        for part in parts:
            if not begun:
                begin(part)
            for _ in begun.pop():
                pass


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
) -> None:
    """Receive all parts from `first` on, and hand over those that the inbox has not had yet: a
    round begins with the first part that any of its engines lacks.

    Raises:
        TransferFailed: if the trainer or a peer was lost, or a bucket took too long.
        EngineStuck: if the engine took too long.
    """
    staging = link.staging(inbox.staging, group.device)
    trailer = group.allocate(trailer_bytes(manifest))
    buckets = slots_by_bucket(manifest)
    ends: list[Callable[[], None]] = []

    def receive(part: int, look_ahead: Callable[[], None]) -> Generator[None]:
        num_bytes = manifest.bucket_bytes[part]
        is_new = part >= inbox.has
        has_room = is_new or not inbox.is_whole
        if has_room:
            inbox.wait_for_room(deadline.within(limit_s))
            bucket = staging[(part if is_new else inbox.has) % len(staging)][:num_bytes]
        else:  # all the memory is spoken for
            bucket = group.allocate(num_bytes)
        arrived: Arrived | None = None
        try:
            limit = deadline.within(limit_s)
            pieces = pieces_of(buckets[part], num_bytes, split=group.device.type == "cpu")
            waits = [group.move(bucket[piece.start : piece.end], limit) for piece in pieces]
            if part == len(buckets) - 1:
                ends.append(group.move(trailer, limit))
            yield
            arriving = _arriving(pieces, waits, look_ahead)
            if is_new:
                arrived = Arrived.inspect(bucket, arriving)
            else:
                list(arriving)
        finally:
            if has_room and arrived is None:
                inbox.return_room()
        if arrived is not None:
            inbox.put_bucket(arrived)

    def has_memory(part: int) -> bool:
        return inbox.is_whole or (part > inbox.has and inbox.has_room())

    _move_all(range(first, len(buckets)), receive, has_memory)
    if not ends:
        ends.append(group.move(trailer, deadline.within(limit_s)))
    ends.pop()()
    inbox.put_trailer(bytes(host_bytes(trailer)))


def _arriving(
    pieces: Sequence[Piece], waits: Sequence[Callable[[], None]], look_ahead: Callable[[], None]
) -> Iterator[TensorSlot]:
    """Yield the slots of a bucket, each when it has arrived: who reads it at once finds it in the
    cache, and does so while the next one travels.
    """
    for index, (piece, wait) in enumerate(zip(pieces, waits, strict=True), 1):
        if index == len(pieces) > 1:
            look_ahead()
        wait()
        yield from piece.slots
