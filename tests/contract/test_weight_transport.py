"""Every weight transport, by name: what arrives is what was sent, or nothing is stamped; and
whatever happened, no engine stays paused and the next transfer works.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest
import torch
from tests.helpers.transport_fleet import (
    STREAMED,
    WHOLE,
    Fleet,
    both_sizes,
    every_transport,
    one_and_three,
    run,
)
from tests.helpers.weights import AdoptingFakeSink, FakeSink, make_tensors

from ratchet.errors import TransferFailed, WeightsMismatch
from ratchet.transport.weights.base import LoadReport, SendReport
from ratchet.transport.weights.finalize import Arrived
from ratchet.types import TensorSlot

pytestmark = every_transport


@both_sizes
@one_and_three
def test_every_engine_holds_what_was_sent(
    transport: str, num_engines: int, bucket_mib: float
) -> None:
    async def main() -> None:
        async with Fleet(transport, num_engines, bucket_mib=bucket_mib) as fleet:
            digests = [await fleet.sync_well() for _ in range(3)]
            assert len(set(digests)) == 3
            assert not any(name.startswith("MainThread") for name in fleet.source.threads)

    run(main)


@both_sizes
def test_order_is_pause_write_verify_stamp_resume(transport: str, bucket_mib: float) -> None:
    async def main() -> None:
        async with Fleet(transport, bucket_mib=bucket_mib) as fleet:
            await fleet.sync_well()
            (sink,) = fleet.sinks.values()
            order = list(dict.fromkeys(sink.events))
            assert order == ["pause", "write", "read", "stamp", "resume"]
            assert [sink.events.count(event) for event in ("pause", "stamp", "resume")] == [1, 1, 1]

    run(main)


@pytest.mark.parametrize("engine_ties", [True, False])
def test_tied_parameters_travel_once(transport: str, engine_ties: bool) -> None:
    tie = {"head.weight": "embed.weight"}

    async def main() -> None:
        async with Fleet(transport, aliases=tie) as tied, Fleet(transport) as untied:
            if not engine_ties:
                own = {**tied.source.tensors, "head.weight": tied.source.tensors["embed.weight"]}
                tied.sinks = {name: FakeSink(own) for name in tied.sinks}
            digest = await tied.sync_well()
            assert digest == await untied.sync_well()

    run(main)


def test_parameters_tied_only_at_the_engine_are_refused(transport: str) -> None:
    async def main() -> None:
        async with Fleet(transport) as fleet:
            tensors = dict(fleet.source.tensors)
            del tensors["layers.1.weight"]
            fleet.sinks = {
                name: FakeSink(tensors, {"layers.1.weight": "layers.0.weight"})
                for name in fleet.sinks
            }
            sent, (loaded,) = await fleet.sync()
            assert isinstance(sent, TransferFailed)
            assert isinstance(loaded, WeightsMismatch)
            assert "layers.1.weight and layers.0.weight" in str(loaded)

    run(main)


@both_sizes
def test_one_bit_lost_in_transit_is_caught(
    transport: str, bucket_mib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspect = Arrived.inspect
    calls = itertools.count()  # from a thread for each engine

    def flip(
        bucket: torch.Tensor, slots: Sequence[TensorSlot], ends: Iterable[int] = ()
    ) -> Arrived:
        if next(calls) == 0:
            ends = list(ends)
            bucket[70] ^= 1
        return inspect(bucket, slots, ends)

    async def main() -> None:
        async with Fleet(transport, 3, bucket_mib=bucket_mib) as fleet:
            await fleet.sync_well()
            monkeypatch.setattr(Arrived, "inspect", flip)
            sent, loaded = await fleet.sync()
            assert isinstance(sent, SendReport)
            failed = [
                (sink, report)
                for sink, report in zip(fleet.sinks.values(), loaded, strict=True)
                if not isinstance(report, LoadReport)
            ]
            ((sink, error),) = failed
            assert isinstance(error, WeightsMismatch)
            assert "bucket 0" in str(error)
            # verified before the engine is touched, where all of it fits into staging memory
            assert sink.version == (1 if bucket_mib == WHOLE else None)
            assert sink.events.count("pause") == (1 if bucket_mib == WHOLE else 2)
            assert not sink.paused
            await fleet.sync_well()

    run(main)


@both_sizes
@pytest.mark.parametrize("name", ["layers.0.weight", "steps", "norm.weight"])
def test_one_bit_lost_in_the_engine_is_caught(transport: str, bucket_mib: float, name: str) -> None:
    async def main() -> None:
        async with Fleet(transport, bucket_mib=bucket_mib) as fleet:
            await fleet.sync_well()
            (sink,) = fleet.sinks.values()

            def flip() -> None:
                if sink.events.count("read") == reads + 1:
                    sink.tensors[name].view(-1).view(torch.uint8)[-1] ^= 1

            reads = sink.events.count("read")
            sink.on["read"] = flip
            sent, (loaded,) = await fleet.sync()
            assert isinstance(sent, SendReport)
            assert isinstance(loaded, WeightsMismatch)
            assert name in str(loaded)
            assert sink.version is None
            assert not sink.paused
            del sink.on["read"]
            await fleet.sync_well()

    run(main)


def test_only_the_read_back_sees_a_bit_lost_in_the_engine(transport: str) -> None:
    async def main() -> None:
        async with Fleet(transport, verify=False) as fleet:
            (sink,) = fleet.sinks.values()
            sink.on["stamp"] = lambda: sink.tensors["norm.weight"].zero_()
            _, (loaded,) = await fleet.sync()
            assert isinstance(loaded, LoadReport)
            assert "read" not in sink.events

    run(main)


def test_an_untied_copy_in_the_engine_is_verified_too(transport: str) -> None:
    async def main() -> None:
        async with Fleet(transport, aliases={"head.weight": "embed.weight"}) as fleet:
            own = {**fleet.source.tensors, "head.weight": fleet.source.tensors["embed.weight"]}
            sink = FakeSink(own)
            fleet.sinks = dict.fromkeys(fleet.sinks, sink)
            sink.on["read"] = lambda: sink.tensors["head.weight"].zero_()
            _, (loaded,) = await fleet.sync()
            assert isinstance(loaded, WeightsMismatch)
            assert "head.weight" in str(loaded)

    run(main)


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "dtype"])
def test_a_parameter_that_does_not_fit_is_named_at_both_ends(transport: str, fault: str) -> None:
    def misfit(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        changed = dict(tensors)
        name = "layers.3.weight"
        if fault == "missing":
            changed["layers.3.bias"] = torch.zeros(5)
        elif fault == "unknown":
            del changed[name]
        else:
            changed[name] = changed[name][:7] if fault == "shape" else changed[name].float()
        return changed

    async def main() -> None:
        async with Fleet(transport, 2) as fleet:
            await fleet.sync_well()
            good, bad = fleet.sinks
            fleet.sinks[bad] = FakeSink(misfit(fleet.source.tensors), version=1)
            sent, (loaded, refused) = await fleet.sync()
            assert isinstance(refused, WeightsMismatch)
            assert isinstance(sent, SendReport)
            assert list(sent.lost) == [bad]
            for text in (sent.lost[bad], str(refused)):
                assert "layers.3." in text
            assert fleet.sinks[bad].events == []
            assert isinstance(loaded, LoadReport), "the others are not held up"
            assert fleet.sinks[good].version == fleet.version
            await fleet.sync_well([good])

    run(main)


@one_and_three
def test_an_engine_that_adopts_generates_with_its_version_while_the_next_arrives(
    transport: str, num_engines: int
) -> None:
    """Two memories in turns; the one that it generates with is not received into."""

    async def main() -> None:
        async with Fleet(transport, 0, bucket_mib=STREAMED, staging_mib=WHOLE) as fleet:
            for _ in range(num_engines):
                fleet.add(AdoptingFakeSink(fleet.source.tensors))
            await fleet.sync_well()

            def look(names: Sequence[str]) -> None:
                before = make_tensors(fleet.version - 1)
                for sink in fleet.sinks.values():
                    if not sink.paused and sink.version == fleet.version - 1:
                        assert all(torch.equal(sink.tensors[key], before[key]) for key in before)

            fleet.source.on_read = look
            places: dict[str, list[int]] = {name: [] for name in fleet.sinks}
            for _ in range(5):
                await fleet.sync_well()
                for name, sink in fleet.sinks.items():
                    places[name].append(sink.tensors["layers.2.weight"].data_ptr())
            for name, (first, second, *rest) in places.items():
                assert first != second
                assert rest == [first, second, first]
                assert "write" not in fleet.sinks[name].events

    run(main)


def test_an_engine_whose_adoption_fails_is_quarantined_and_adopts_the_next(
    transport: str,
) -> None:
    async def main() -> None:
        async with Fleet(transport, 0, bucket_mib=STREAMED, staging_mib=WHOLE) as fleet:
            sink = AdoptingFakeSink(fleet.source.tensors)
            fleet.add(sink)
            await fleet.sync_well()
            await fleet.sync_well()
            sink.fail_in = "adopt"
            _, (loaded,) = await fleet.sync()
            assert str(loaded) == "the engine fails in adopt"
            assert sink.version is None
            assert not sink.paused
            sink.fail_in = None
            for _ in range(3):
                await fleet.sync_well()

    run(main)
