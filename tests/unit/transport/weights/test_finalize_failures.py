"""What breaks on the way into an engine: nothing wrong is stamped, and the engine is resumed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tests.helpers.finalize_stage import Stage
from tests.helpers.weights import make_tensors

from ratchet.errors import TransferFailed, WeightsMismatch
from ratchet.transport.weights.finalize import Arrived, finalize
from ratchet.transport.weights.plan import slots_by_bucket


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
