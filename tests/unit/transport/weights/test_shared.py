"""Buckets through shared memory: what is gathered is what is read, nobody reads what is being
overwritten, and nobody waits for an end that is gone.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.helpers.weights import make_tensors, specs_of

from ratchet.errors import TransferFailed
from ratchet.transport.weights.deadline import Deadline
from ratchet.transport.weights.finalize import Arrived
from ratchet.transport.weights.plan import make_manifest
from ratchet.transport.weights.shared import SharedRing, Sharing
from ratchet.transport.weights.shared_door import host_id
from ratchet.transport.weights.shared_reader import SharedReader
from ratchet.transport.weights.shared_segment import OwnSegment, SeenSegment
from ratchet.types import TensorSlot

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


def test_memory_is_closed_once() -> None:
    segment = OwnSegment(64, 64)
    number = segment.fd
    segment.close()
    with os.fdopen(os.dup2(os.open(os.devnull, os.O_RDONLY), number)):
        segment.close()
        os.fstat(number)


def check_all(taker: Taker, number: int = 0) -> None:
    assert len(taker.buckets) == NUM_BUCKETS
    for index, bucket in enumerate(taker.buckets):
        assert torch.equal(bucket, values(number, index)), index
    assert taker.trailer == TRAILER


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


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


def test_a_reader_without_room_is_dropped_in_time_for_the_others(ends: Ends) -> None:
    quick, stuck = Taker(), Taker(rooms=2)
    sharing, loads = ends.open({1: quick, 2: stuck})
    send(sharing, timeout_s=0.3)
    loads[1].result(10)
    check_all(quick)
    assert sharing.ranks == {1}
    assert "took no bucket for 0.3 s" in sharing.lost[2]
    stuck.rooms.release(NUM_BUCKETS)
    with pytest.raises(TransferFailed, match="goes on without this engine"):
        loads[2].result(10)
    assert not stuck.trailer


def test_a_reader_that_does_not_come_is_dropped_in_time_for_the_others(ends: Ends) -> None:
    taker = Taker()
    sharing, loads = ends.open({1: taker}, absent=2)
    send(sharing, timeout_s=0.2)
    loads[1].result(10)
    check_all(taker)
    assert list(sharing.lost) == [2]


def test_the_only_reader_has_the_whole_time_and_no_more(ends: Ends) -> None:
    sharing, loads = ends.open({1: Taker(rooms=2)}, timeout_s=0.3)
    send(sharing, timeout_s=0.2)
    assert not sharing.ranks
    assert "0.2 s" in sharing.lost[1]
    with pytest.raises(TransferFailed, match="no room"):
        loads[1].result(10)


def test_a_reader_that_hangs_up_is_lost_at_once(ends: Ends) -> None:
    taker, gone = Taker(), SharedReader()
    sharing, loads = ends.open({1: taker}, absent=2)
    gone.knock(ends.ring.address, "transfer-1", 2, Deadline(5.0))
    looks = itertools.count(1)

    def hang_up_at_last() -> None:
        if next(looks) == 4:
            gone.hang_up()

    send(sharing, check=hang_up_at_last)
    loads[1].result(10)
    check_all(taker)
    assert sharing.lost == {2: "it hung up"}


def test_whoever_is_told_to_go_on_without_a_reader_does(ends: Ends) -> None:
    taker = Taker()
    sharing, loads = ends.open({1: taker, 2: Taker(rooms=2)}, timeout_s=0.5)
    send(sharing, check=lambda: sharing.lose(2, "it left"))
    loads[1].result(10)
    check_all(taker)
    sharing.lose(2, "told twice")
    assert sharing.lost == {2: "it left"}


def test_a_check_ends_the_wait_of_either_end(ends: Ends) -> None:
    def give_up() -> None:
        msg = "given up"
        raise TransferFailed(msg)

    sharing, _ = ends.open({}, absent=1)
    with pytest.raises(TransferFailed, match="given up"):
        sharing.wait_for_room(1, Deadline(20.0), give_up)
    reader = SharedReader()
    reader.knock(ends.ring.address, "another", 1, Deadline(1.0))
    with pytest.raises(TransferFailed, match="given up"):
        reader.receive(MANIFEST, Taker(), None, Deadline(20.0), give_up)  # type: ignore[arg-type]
    reader.leave()


def test_a_trainer_that_leaves_ends_its_readers_at_once(ends: Ends) -> None:
    taker = Taker()
    sharing, loads = ends.open({1: taker})
    send(sharing, buckets=range(2))
    assert taker.took[1].wait(10)
    ends.ring.leave()
    with pytest.raises(TransferFailed, match="or is gone"):
        loads[1].result(5)


def test_a_trainer_that_stands_still_is_not_waited_for(ends: Ends) -> None:
    _, loads = ends.open({1: Taker()}, timeout_s=0.2)
    with pytest.raises(TransferFailed, match=r"nothing more within 0.2 s"):
        loads[1].result(5)


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


def test_what_a_reader_writes_stays_its_own() -> None:
    own = OwnSegment(5000, 100)
    seen = [SeenSegment(own.hello, own.fd) for _ in range(2)]
    own.slots[1][:3] = 7
    assert [each.slots[1][2] for each in seen] == [7, 7]
    seen[0].slots[1][2] = 9
    assert own.slots[1][2] == seen[1].slots[1][2] == 7
    other = OwnSegment(5000, 100)
    assert seen[0].is_of(own.fd)
    assert not seen[0].is_of(other.fd)
    own.close()
    other.close()


def test_nobody_can_shrink_the_memory_below_a_reader() -> None:
    own = OwnSegment(5000, 100)
    with pytest.raises(PermissionError):
        os.ftruncate(own.fd, 0)
    own.close()


def test_memory_that_there_is_not_is_an_error_and_nothing_else() -> None:
    def segments() -> set[str]:
        fds = Path("/proc/self/fd").iterdir()
        return {fd.name for fd in fds if "memfd:" in os.path.realpath(fd)}

    before = segments()
    with pytest.raises(OSError, match="bytes of shared memory are needed"):
        OwnSegment(2**50, 0)
    assert segments() <= before  # those of other tests may go


def test_processes_of_this_host_know_each_other() -> None:
    assert host_id()
    assert host_id() == host_id()


def _read_and_stop(address: str) -> None:
    reader = SharedReader()
    reader.knock(address, "transfer-1", 1, Deadline(20.0))
    reader.receive(MANIFEST, Stopper(), None, Deadline(20.0), nothing)  # type: ignore[arg-type]


class Stopper(Taker):
    def put_bucket(self, arrived: Arrived) -> None:
        super().put_bucket(arrived)
        if len(self.buckets) == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_reader_that_is_killed_is_lost_at_once(ends: Ends) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=_read_and_stop, args=(ends.ring.address,)
    )
    taker = Taker()
    process.start()
    sharing, loads = ends.open({2: taker}, absent=1)
    send(sharing)
    loads[2].result(10)
    process.join(10)
    check_all(taker)
    assert sharing.lost == {1: "it hung up"}
