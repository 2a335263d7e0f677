"""The trainer's staging buffers: what is gathered when, for whom, and who waits for whom."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from time import monotonic

import pytest
import torch
from tests.helpers.weights import FakeSource, digest_of_tensors, make_tensors

from ratchet.errors import TransferFailed
from ratchet.transport.weights import gathered as gathered_module
from ratchet.transport.weights import gathering as module
from ratchet.transport.weights.buckets import view
from ratchet.transport.weights.deadline import Deadline
from ratchet.transport.weights.digest import make_trailer, whole_digest
from ratchet.transport.weights.gathered import Gathered
from ratchet.transport.weights.gathering import Gathering
from ratchet.transport.weights.pieces import pieces_of
from ratchet.transport.weights.plan import make_manifest, slots_by_bucket

NUM = 6


class Lanes:
    """A gathering of buckets that hold one parameter each, and the threads around it."""

    def __init__(
        self, *lanes: str, on_read: Callable[[Sequence[str]], object] | None = None
    ) -> None:
        self.source = FakeSource({f"p{n}": torch.full((64,), n) for n in range(NUM)})
        self.reads = Counter[str]()
        self.source.on_read = on_read or self.reads.update
        self.manifest = make_manifest(self.source.specs(), 64, term=1, version=2, step=2)
        size = max(self.manifest.bucket_bytes)
        self.gathering = Gathering(
            self.manifest,
            self.source,
            lambda: [torch.zeros(size, dtype=torch.uint8) for _ in range(2)],
            lanes,
            2**20,
        )
        self.error: BaseException | None = None
        self.runs = threading.Thread(target=self._run)
        self._threads = [self.runs]
        self.runs.start()

    def _run(self) -> None:
        try:
            self.gathering.run()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def read(self, lane: str, parts: Sequence[int]) -> None:
        """Let a lane read buckets, each of which must hold what it should."""
        for part in parts:
            with self.gathering.bucket(lane, part, Deadline(20.0)) as gathered:
                assert list(self.gathering.coming(gathered, Deadline(20.0))) == [0]
                assert values(gathered) == [part] * 64

    def start(self, lane: str, parts: Sequence[int] = range(NUM)) -> threading.Thread:
        def run() -> None:
            self.read(lane, parts)
            self.gathering.end(lane)

        thread = threading.Thread(target=run)
        thread.start()
        self._threads.append(thread)
        return thread

    def close(self) -> None:
        self.gathering.stop()
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()


def values(gathered: Gathered) -> list[int]:
    return torch.cat(list(gathered.pieces)).view(torch.int64).tolist()


@pytest.fixture
def opened() -> Iterator[list[Lanes]]:
    lanes: list[Lanes] = []
    yield lanes
    for each in lanes:
        each.close()


def test_a_lane_reads_every_bucket_once_and_in_order(opened: list[Lanes]) -> None:
    lanes = Lanes("a")
    opened.append(lanes)
    lanes.start("a").join(20)
    lanes.close()
    assert lanes.error is None
    assert lanes.reads == {f"p{n}": 1 for n in range(NUM)}
    digests = [lanes.gathering._digests[n] for n in range(NUM)]
    assert lanes.gathering.digest == whole_digest(digests)
    assert lanes.gathering.trailer() == make_trailer(lanes.manifest, digests)


def test_the_first_bucket_is_gathered_before_anyone_asks(opened: list[Lanes]) -> None:
    gathered = threading.Event()
    opened.append(Lanes("a", on_read=lambda names: gathered.set()))
    assert gathered.wait(20)


def test_a_failure_before_the_lanes_have_come_is_told_when_they_have(opened: list[Lanes]) -> None:
    failed = threading.Event()

    def fail(names: Sequence[str]) -> None:
        failed.set()
        raise RuntimeError(names)

    lanes = Lanes("a", on_read=fail)
    opened.append(lanes)
    assert failed.wait(20)
    lanes.runs.join(0.2)
    assert lanes.runs.is_alive()
    with pytest.raises(TransferFailed), lanes.gathering.bucket("a", 0, Deadline(0.2)):
        pass
    lanes.runs.join(20)
    assert isinstance(lanes.error, RuntimeError)


def test_the_next_bucket_is_gathered_while_one_travels(opened: list[Lanes]) -> None:
    lanes = Lanes("a")
    opened.append(lanes)
    gathered = threading.Event()
    lanes.source.on_read = lambda names: gathered.set() if names == ["p1"] else None
    with lanes.gathering.bucket("a", 0, Deadline(20.0)):
        assert gathered.wait(20)
    lanes.gathering.end("a")


def test_never_more_than_one_bucket_ahead(opened: list[Lanes]) -> None:
    """Two buffers: one that travels, and the next."""
    lanes = Lanes("a", "b")
    opened.append(lanes)
    other = lanes.start("b", [0])
    with lanes.gathering.bucket("a", 0, Deadline(20.0)):
        other.join(20)
        assert set(lanes.reads) <= {"p0", "p1"}
    lanes.gathering.end("a")


def test_lanes_in_step_share_what_is_gathered(
    opened: list[Lanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLOW_S", 20.0)  # on a busy machine, too
    lanes = Lanes("a", "b")
    opened.append(lanes)
    steps = threading.Barrier(2, timeout=20)

    def read(lane: str) -> None:
        for part in range(NUM):
            with lanes.gathering.bucket(lane, part, Deadline(20.0)) as gathered:
                steps.wait()  # neither comes late to a bucket
                assert list(lanes.gathering.coming(gathered, Deadline(20.0))) == [0]
                assert values(gathered) == [part] * 64
        lanes.gathering.end(lane)

    threads = [threading.Thread(target=read, args=(lane,)) for lane in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert lanes.reads == {f"p{n}": 1 for n in range(NUM)}


def test_a_lane_that_hangs_does_not_hold_the_others(opened: list[Lanes]) -> None:
    lanes = Lanes("slow", "other")
    opened.append(lanes)
    other = lanes.start("other")
    with lanes.gathering.bucket("slow", 0, Deadline(20.0)) as gathered:
        other.join(20)
        assert not other.is_alive()
        list(lanes.gathering.coming(gathered, Deadline(20.0)))
        assert values(gathered) == [0] * 64, "its buffer is still its own"
    lanes.start("slow", range(1, NUM)).join(20)
    lanes.close()
    assert lanes.error is None
    assert lanes.reads["p0"] == 1
    assert 1 < max(lanes.reads.values()) <= 2, "what it missed is gathered again, for it alone"


def test_a_lane_that_comes_back_for_less_does_not_hold_the_others(opened: list[Lanes]) -> None:
    """As after a round that broke: it wants what the others have had."""
    order: list[str] = []
    lanes = Lanes("again", "a", on_read=order.extend)
    opened.append(lanes)
    first = lanes.start("a")
    lanes.read("again", [0])
    with pytest.raises(RuntimeError), lanes.gathering.bucket("again", 1, Deadline(20.0)):
        raise RuntimeError
    first.join(20)
    assert order[:NUM] == [f"p{n}" for n in range(NUM)], "not before the others have ended"
    lanes.start("again", range(1, NUM)).join(20)


def test_a_lane_that_is_late_at_the_start_is_waited_for_a_moment(opened: list[Lanes]) -> None:
    lanes = Lanes("a", "late")
    opened.append(lanes)
    first = lanes.start("a")
    lanes.start("late").join(20)
    first.join(20)
    assert lanes.reads["p0"] == 1


def test_values_that_change_during_a_transfer_are_an_error(opened: list[Lanes]) -> None:
    lanes = Lanes("a", "again")
    opened.append(lanes)
    lanes.read("a", [0, 1, 2])
    lanes.gathering.end("a")
    lanes.source.tensors["p0"] += 1
    with pytest.raises(TransferFailed), lanes.gathering.bucket("again", 0, Deadline(0.2)):
        pass
    lanes.close()
    assert "bucket 0 changed during the transfer" in str(lanes.error)


def test_a_source_that_fails_ends_the_thread(opened: list[Lanes]) -> None:
    def fail(names: Sequence[str]) -> None:
        msg = "out of memory"
        raise MemoryError(msg)

    lanes = Lanes("a", on_read=fail)
    opened.append(lanes)
    with (
        pytest.raises(TransferFailed, match=r"not read within 0\.2 s"),
        lanes.gathering.bucket("a", 0, Deadline(0.2)),
    ):
        pass
    lanes.close()
    assert isinstance(lanes.error, MemoryError)


def test_stop_unblocks_a_lane_at_once(opened: list[Lanes]) -> None:
    go_on = threading.Event()
    lanes = Lanes("a", on_read=lambda names: _true(go_on.wait(20)))
    opened.append(lanes)
    start = monotonic()
    threading.Timer(0.05, lanes.gathering.stop).start()
    with (
        pytest.raises(TransferFailed, match="given up"),
        lanes.gathering.bucket("a", 0, Deadline(60.0)),
    ):
        pass
    assert monotonic() - start < 20
    go_on.set()


def test_a_bucket_travels_as_far_as_it_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second tensor is not read before the first piece has arrived; the last piece comes with
    the digest.
    """
    digest_of_bucket, ready = module.bucket_digest, list[int]()

    def note(digests: Sequence[bytes]) -> bytes:
        ready.append(gathering._buffers[0].num_ready)
        return digest_of_bucket(digests)

    monkeypatch.setattr(gathered_module, "_NEWS_BYTES", 1)
    monkeypatch.setattr(module, "bucket_digest", note)
    tensors = {f"p{n}": torch.full((2**16,), n) for n in range(3)}
    first_arrived = threading.Event()

    class Slow(torch.Tensor):
        def detach(self) -> torch.Tensor:
            assert first_arrived.wait(20)
            return super().detach()

    tensors["p1"] = tensors["p1"].as_subclass(Slow)
    source = FakeSource(tensors)
    manifest = make_manifest(source.specs(), 2**30, term=1, version=2, step=2)
    staging = [torch.zeros(max(manifest.bucket_bytes), dtype=torch.uint8) for _ in range(2)]
    gathering = Gathering(manifest, source, lambda: staging, ["a"], 2**16)
    thread = threading.Thread(target=gathering.run)
    thread.start()
    with gathering.bucket("a", 0, Deadline(20.0)) as gathered:
        for number in gathering.coming(gathered, Deadline(20.0)):
            assert gathered.pieces[number].view(torch.int64).tolist() == [number] * 2**16
            first_arrived.set()
    gathering.end("a")
    thread.join(20)
    assert ready == [2]


@pytest.mark.parametrize("in_place", [True, False])
def test_large_tensors_travel_from_where_they_are(in_place: bool) -> None:
    tensors = make_tensors(1)
    turned = torch.randn(300, 300).t()
    tensors["embed.weight"], tensors["turned"] = torch.randn(300, 300), turned
    source = FakeSource(tensors)
    manifest = make_manifest(source.specs(), 2**20, term=1, version=2, step=2)
    staging = [torch.zeros(max(manifest.bucket_bytes), dtype=torch.uint8) for _ in range(2)]
    gathering = Gathering(manifest, source, lambda: staging, ["a"], 2**16, in_place=in_place)
    thread = threading.Thread(target=gathering.run)
    thread.start()
    arrived: list[torch.Tensor] = []
    at: set[int] = set()
    for part, slots in enumerate(slots_by_bucket(manifest)):
        bucket = torch.zeros(manifest.bucket_bytes[part], dtype=torch.uint8)
        with gathering.bucket("a", part, Deadline(20.0)) as gathered:
            pieces = pieces_of(slots, len(bucket), 2**16)
            list(gathering.coming(gathered, Deadline(20.0)))
            for piece, data in zip(pieces, gathered.pieces, strict=True):
                bucket[piece.start : piece.end] = data
                at.add(data.data_ptr())
        arrived += [view(bucket, slot) for slot in slots]
    gathering.end("a")
    thread.join(20)
    for tensor, sent in zip(arrived, tensors.values(), strict=True):
        assert torch.equal(tensor, sent)
    assert gathering.digest == digest_of_tensors(tensors, 2**20)
    large = {name for name, tensor in tensors.items() if tensor.data_ptr() in at}
    contiguous = {name for name in tensors if name.endswith("weight")} - {"norm.weight"}
    assert large == (contiguous if in_place else set())


def _true(value: bool) -> None:
    assert value
