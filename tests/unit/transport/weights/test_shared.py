"""Buckets through shared memory: what is gathered is what is read, and nobody reads what is being
overwritten.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest
import torch
from tests.helpers.shared_ends import (
    MANIFEST,
    NUM_BUCKETS,
    Ends,
    Taker,
    check_all,
    nothing,
    send,
    values,
)
from tests.helpers.weights import make_tensors, specs_of

from ratchet.errors import TransferFailed
from ratchet.transport.weights.deadline import Deadline
from ratchet.transport.weights.finalize import Arrived
from ratchet.transport.weights.plan import make_manifest
from ratchet.transport.weights.shared import SharedRing
from ratchet.transport.weights.shared_door import host_id
from ratchet.transport.weights.shared_reader import SharedReader
from ratchet.types import TensorSlot


def test_a_reader_with_memory_of_its_own_keeps_nobody_waiting(ends: Ends) -> None:
    """It copies each bucket before it gives room, so what it has stays what it was."""
    taker = Taker(rooms=0)
    taker.is_whole = True
    taker.keep = lambda bucket: bucket
    staging = [torch.zeros(size, dtype=torch.uint8) for size in MANIFEST.bucket_bytes]
    ends.ring.reserve(MANIFEST)
    sharing = ends.ring.open("transfer", [1])
    reader = ends.readers[1] = SharedReader()
    reader.knock(ends.ring.address, "transfer", 1, Deadline(20.0))
    load = ends.pool.submit(reader.receive, MANIFEST, taker, staging, Deadline(20.0), nothing)
    send(sharing)
    load.result(10)
    check_all(taker)
    assert {bucket.data_ptr() for bucket in taker.buckets} == {b.data_ptr() for b in staging}
    reader.finish(taker, Deadline(5.0))  # type: ignore[arg-type]
    assert sharing.wait_until_read(Deadline(5.0), nothing)


def test_room_is_given_when_a_bucket_was_copied_and_not_before(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms, copies = itertools.count(), itertools.count()
    given = 0

    def watch(
        bucket: torch.Tensor, slots: Sequence[TensorSlot], ends: Iterable[int] = ()
    ) -> Arrived:
        arrived = inspect(bucket, slots, ends)
        assert given == next(copies) + 2
        return arrived

    def count(reader: SharedReader) -> None:
        nonlocal given
        given = next(rooms) + 1
        give(reader)

    give, inspect = SharedReader._give_room, Arrived.inspect
    monkeypatch.setattr(SharedReader, "_give_room", count)
    monkeypatch.setattr(Arrived, "inspect", watch)
    ends.ring.reserve(MANIFEST)
    sharing = ends.ring.open("transfer", [1])
    reader = ends.readers[1] = SharedReader()
    reader.knock(ends.ring.address, "transfer", 1, Deadline(20.0))
    staging = [torch.zeros(size, dtype=torch.uint8) for size in MANIFEST.bucket_bytes]
    load = ends.pool.submit(reader.receive, MANIFEST, Taker(), staging, Deadline(20.0), nothing)
    send(sharing)
    load.result(10)
    assert next(copies) == NUM_BUCKETS


def test_every_reader_gets_every_bucket_and_the_memory_is_kept(ends: Ends) -> None:
    memories = set()
    for number in range(3):
        takers = {rank: Taker() for rank in (1, 2, 3)}
        sharing, loads = ends.open(takers)
        send(sharing, number)
        for load in loads.values():
            load.result(10)
        for rank, taker in takers.items():
            check_all(taker, number)
            ends.readers[rank].finish(taker, Deadline(5.0))  # type: ignore[arg-type]
        assert sharing.wait_until_read(Deadline(5.0), nothing)
        memories.add(sharing.slots[0].data_ptr())
    assert len(memories) == 1


def test_a_bucket_waits_until_every_reader_has_room(ends: Ends) -> None:
    quick, slow = Taker(), Taker(rooms=2)
    sharing, loads = ends.open({1: quick, 2: slow})
    sending = ends.pool.submit(send, sharing)
    assert quick.took[1].wait(10)
    assert slow.took[1].wait(10)
    assert not quick.took[2].wait(0.1), "its slot is still in use"
    slow.rooms.release(NUM_BUCKETS)
    sending.result(10)
    for load in loads.values():
        load.result(10)
    check_all(quick)
    check_all(slow)


def test_memory_that_is_still_read_is_left_to_its_reader(ends: Ends) -> None:
    sharing, loads = ends.open({1: Taker()})
    send(sharing)
    loads[1].result(10)
    segment = ends.readers[1]._segment
    assert segment is not None
    last = segment.slots[(NUM_BUCKETS - 1) % 2][: MANIFEST.bucket_bytes[-1]]
    taker = Taker()
    assert not sharing.wait_until_read(Deadline(0.05), nothing)
    ends.ring.reserve(MANIFEST)
    sharing = ends.ring.open("next", [2])
    reader = ends.readers[2] = SharedReader()
    reader.knock(ends.ring.address, "next", 2, Deadline(5.0))
    load = ends.pool.submit(reader.receive, MANIFEST, taker, None, Deadline(5.0), nothing)
    send(sharing, 1)
    load.result(10)
    check_all(taker, 1)
    assert torch.equal(last, values(0, NUM_BUCKETS - 1))


def test_a_larger_transfer_gets_larger_memory(ends: Ends) -> None:
    large = make_manifest(specs_of(make_tensors(1), {}), 2**22, term=1, version=1, step=1)
    sizes = []
    for manifest in (MANIFEST, large, MANIFEST):
        ends.ring.reserve(manifest)
        sizes.append(len(ends.ring.slots[0]))
    assert sizes[0] < sizes[1] == sizes[2]


def test_a_stranger_at_the_door_is_turned_away(ends: Ends) -> None:
    stranger = SharedReader()
    stranger.knock(ends.ring.address, "another transfer", 1, Deadline(5.0))
    taker = Taker()
    sharing, loads = ends.open({1: taker})
    send(sharing)
    loads[1].result(10)
    with pytest.raises(TransferFailed, match="goes on without this engine"):
        stranger.receive(MANIFEST, taker, None, Deadline(5.0), nothing)  # type: ignore[arg-type]
    stranger.leave()


def test_nobody_opens_a_closed_door() -> None:
    ring = SharedRing()
    ring.close()
    with pytest.raises(ConnectionRefusedError):
        SharedReader().knock(ring.address, "transfer", 1, Deadline(1.0))


def test_processes_of_this_host_know_each_other() -> None:
    assert host_id()
    assert host_id() == host_id()
