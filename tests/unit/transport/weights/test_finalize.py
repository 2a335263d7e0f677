"""The one way into an engine: what it waits for, what it holds, when it pauses, what it leaves."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.finalize_stage import Stage

from ratchet.errors import WeightsMismatch
from ratchet.transport.weights.buckets import view
from ratchet.transport.weights.digest import whole_digest
from ratchet.transport.weights.finalize import Arrived
from ratchet.transport.weights.plan import slots_by_bucket


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
