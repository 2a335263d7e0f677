"""The one way into an engine: what it waits for, what it holds, when it pauses, what it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from tests.helpers.weights import (
    AdoptingFakeSink,
    FakeSink,
    ProbedFakeSink,
    make_tensors,
    pack_all,
    specs_of,
)

from ratchet.errors import TransferFailed, WeightsMismatch
from ratchet.transport.weights.base import LoadReport
from ratchet.transport.weights.buckets import view
from ratchet.transport.weights.digest import make_trailer, whole_digest
from ratchet.transport.weights.finalize import Arrived, finalize
from ratchet.transport.weights.plan import check_specs, make_manifest, slots_by_bucket
from ratchet.types import Packed, WeightProbe


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


def test_a_small_model_is_verified_before_the_engine_is_touched() -> None:
    stage = Stage(2**26)
    report = stage.load()
    assert stage.events == [
        *["arrive", "trailer"],
        *["pause", "write", "read", "commit", "stamp", "resume"],
    ]
    assert report.digest == whole_digest(stage.digests)
    assert stage.sink.version == 7
    assert report.paused_s > 0


def test_a_large_model_is_streamed() -> None:
    stage = Stage(100_000)
    assert stage.num_buckets == 8
    stage.load(verify=False)
    assert stage.events == [
        *["arrive", "arrive", "pause", "write", "write"],
        *["arrive", "write"] * 5,
        *["arrive", "trailer", "write"],
        *["commit", "stamp", "resume"],
    ]
    assert stage.most_held == stage.room
    assert stage.sink.version == 7
    for name, tensor in stage.tensors.items():
        assert torch.equal(stage.sink.tensors[name], tensor)


def test_a_large_model_that_fits_into_staging_memory_is_verified_before_the_pause() -> None:
    stage = Stage(100_000)
    stage.room = 8
    stage.load(verify=False)
    assert stage.events == [
        *["arrive"] * 8,
        *["trailer", "pause"],
        *["write"] * 8,
        *["commit", "stamp", "resume"],
    ]
    assert stage.sink.version == 7


def test_an_engine_that_can_adopt_generates_with_the_memory_that_was_verified() -> None:
    stage = Stage(100_000, adopts=True)
    stage.room = 8
    stage.load()
    assert stage.events == [
        *["arrive"] * 8,
        *["trailer", "pause", "hand over", "adopt", "read", "adopted"],
        *["commit", "stamp", "resume"],
    ]
    assert stage.sink.version == 7
    for slots, arrived in zip(slots_by_bucket(stage.manifest), stage.buckets, strict=True):
        for slot in slots:
            own = stage.sink.tensors[slot.name]
            assert torch.equal(own, stage.tensors[slot.name])
            assert own.data_ptr() == view(arrived.bucket, slot).data_ptr()


@pytest.mark.parametrize("why", ["streamed", "device", "untied"])
def test_an_engine_that_could_adopt_copies_where_it_must(why: str) -> None:
    stage = Stage(100_000, adopts=True)
    stage.room = 2 if why == "streamed" else 8
    if why == "device":
        stage.sink.adopts = torch.device("meta")  # type: ignore[attr-defined]
    if why == "untied":  # two parameters of the engine's own would share memory
        stage.sink.tensors["copy"] = stage.sink.tensors["embed.weight"].clone()
        stage.owners = {**stage.owners, "embed.weight": ("embed.weight", "copy")}
    stage.load()
    assert "adopt" not in stage.events
    assert stage.events.count("write") == 8
    assert stage.sink.version == 7


@pytest.mark.parametrize("fault", ["copy", "other", "transit"])
def test_an_engine_that_does_not_generate_with_what_was_verified_is_caught(fault: str) -> None:
    stage = Stage(100_000, adopts=True)
    stage.room = 8
    name = "layers.3.weight"
    tensors = stage.sink.tensors

    def spoil() -> None:
        tensors[name] = tensors[name].clone() if fault == "copy" else tensors["layers.4.weight"]

    if fault == "transit":
        stage.buckets[0].bucket[3] ^= 4
        stage.buckets[0] = Arrived.inspect(
            stage.buckets[0].bucket, slots_by_bucket(stage.manifest)[0]
        )
    else:
        stage.sink.on["read"] = spoil
    with pytest.raises(WeightsMismatch, match="bucket 0" if fault == "transit" else name):
        stage.load()
    assert stage.sink.version == (6 if fault == "transit" else None)
    assert "adopted" not in stage.events  # so that neither memory is received into again
    assert "stamp" not in stage.events


@pytest.mark.parametrize("lost_at", [0, 1])
def test_a_transfer_that_breaks_early_leaves_the_engine_alone(lost_at: int) -> None:
    stage = Stage(100_000)
    stage.lost_at = lost_at
    with pytest.raises(TransferFailed, match="gone"):
        stage.load()
    assert set(stage.events) == {"arrive"}
    assert stage.sink.version == 6


def test_a_transfer_that_breaks_late_quarantines_the_engine_and_resumes_it() -> None:
    stage = Stage(100_000)
    stage.lost_at = 4
    with pytest.raises(TransferFailed, match="gone"):
        stage.load()
    assert stage.events[-1] == "resume"
    assert "stamp" not in stage.events
    assert stage.sink.version is None
    assert not stage.sink.paused


@pytest.mark.parametrize("bucket", range(8))
def test_a_damaged_bucket_is_never_stamped(bucket: int) -> None:
    stage = Stage(100_000)
    damaged = stage.buckets[bucket]
    damaged.bucket[3] ^= 4
    slots = slots_by_bucket(stage.manifest)[bucket]
    stage.buckets[bucket] = Arrived.inspect(damaged.bucket, slots)
    with pytest.raises(WeightsMismatch, match=f"bucket {bucket} of 8"):
        stage.load()
    assert "stamp" not in stage.events
    assert stage.events[-1] == "resume"
    assert stage.sink.version is None


@pytest.mark.parametrize("name", list(make_tensors(1)))
def test_what_the_engine_did_not_take_is_named(name: str) -> None:
    stage = Stage(100_000)
    if not stage.tensors[name].numel():
        return

    def flip() -> None:
        if stage.events.count("read") == 1:
            stage.sink.tensors[name].view(-1).view(torch.uint8)[0] ^= 1

    stage.sink.on["read"] = flip
    with pytest.raises(WeightsMismatch, match=f"version 7, {name} at the engine"):
        stage.load()
    assert stage.sink.version is None
    assert stage.events[-1] == "resume"


def test_an_engine_that_answers_with_another_dtype_is_caught() -> None:
    stage = Stage(2**26)

    def widen() -> None:
        stage.sink.tensors["layers.0.weight"] = stage.sink.tensors["layers.0.weight"].float()

    stage.sink.on["read"] = widen
    with pytest.raises(WeightsMismatch, match=r"layers\.0\.weight"):
        stage.load()


def test_a_commit_that_is_refused_stamps_nothing() -> None:
    stage = Stage(2**26)

    def refuse() -> None:
        msg = "the version is burnt"
        raise TransferFailed(msg)

    with pytest.raises(TransferFailed, match="burnt"):
        stage.load(commit=refuse)
    assert "stamp" not in stage.events
    assert stage.events[-1] == "resume"


@pytest.mark.parametrize("method", ["pause", "write", "read", "stamp"])
def test_whatever_fails_the_engine_is_resumed(method: str) -> None:
    stage = Stage(2**26)
    stage.sink.fail_in = method
    with pytest.raises(RuntimeError, match=f"fails in {method}"):
        stage.load()
    assert stage.events[-1] == "resume"
    assert not stage.sink.paused
    assert stage.sink.version == (6 if method == "pause" else None)


def test_a_load_cancelled_twice_resumes_its_engine() -> None:
    stage = Stage(2**26)
    resumed: list[Any] = []

    async def slow_resume() -> None:
        await asyncio.sleep(0.01)
        resumed.append(True)

    stage.sink.resume = slow_resume  # type: ignore[method-assign]

    async def main() -> None:
        stage.sink.hold["write"] = asyncio.Event()
        load = asyncio.create_task(
            finalize(
                stage.manifest,
                stage.owners,
                stage,
                stage.sink,
                "in_place",
                verify=True,
                commit=lambda: None,
            )
        )
        await stage.sink.entered["write"].wait()
        load.cancel()
        await asyncio.sleep(0)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        async with asyncio.timeout(5):
            while not resumed:  # noqa: ASYNC110 - the engine's own, it has no event
                await asyncio.sleep(0.001)

    asyncio.run(main())


PROBE = WeightProbe(3, Packed.of([1, 2, 3], "int32"), Packed.of([-1.0, -2.0], "float32"))
OTHER = WeightProbe(3, Packed.of([1, 2, 3], "int32"), Packed.of([-1.0, -2.5], "float32"))


def probed(probe: WeightProbe | None, computes: WeightProbe) -> tuple[Stage, ProbedFakeSink]:
    stage = Stage(2**26, kind=ProbedFakeSink)
    stage.manifest = msgspec.structs.replace(stage.manifest, probe=probe)
    assert isinstance(stage.sink, ProbedFakeSink)
    stage.sink.computes = computes
    return stage, stage.sink


def test_an_engine_that_cannot_be_read_back_proves_what_it_holds_in_the_stamp() -> None:
    stage, sink = probed(PROBE, PROBE)
    stage.load()
    assert stage.events == [
        *["expect", "arrive", "trailer", "pause", "write", "commit", "stamp", "resume"],
    ]
    assert sink.version == 7


def test_an_engine_that_computes_something_else_is_quarantined_and_resumed() -> None:
    stage, sink = probed(PROBE, OTHER)
    with pytest.raises(WeightsMismatch, match="something else"):
        stage.load()
    assert stage.events[-2:] == ["refused", "resume"]
    assert sink.version is None


def test_without_a_probe_an_engine_that_cannot_be_read_back_is_left_alone() -> None:
    stage, sink = probed(None, OTHER)
    with pytest.raises(WeightsMismatch, match=r"version 7 came without a probe.*weights\.verify"):
        stage.load()
    assert stage.events == []
    assert sink.version == 6


def test_without_verification_it_is_taken_on_trust() -> None:
    stage, sink = probed(PROBE, OTHER)
    stage.load(verify=False)
    assert sink.version == 7
    assert sink.expected is None
