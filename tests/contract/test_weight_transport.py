"""Every weight transport, by name: what arrives is what was sent, or nothing is stamped; and
whatever happened, no engine stays paused and the next transfer works.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from tests.helpers.weights import (
    AdoptingFakeSink,
    FakeSink,
    FakeSource,
    digest_of_tensors,
    make_tensors,
)

from ratchet.config import WeightsConfig
from ratchet.errors import TransferFailed, WeightsMismatch
from ratchet.transport.weights import pieces
from ratchet.transport.weights.base import LoadReport, SendReport, WeightReceiver
from ratchet.transport.weights.finalize import Arrived
from ratchet.transport.weights.groups import GlooGroup
from ratchet.transport.weights.inbox import Inbox
from ratchet.transport.weights.registry import open_receiver, open_sender
from ratchet.transport.weights.staging import Staging
from ratchet.types import TensorSlot, WeightManifest, WeightRoute

Loads = dict[str, asyncio.Task[LoadReport]]

WHOLE, STREAMED = 64.0, 0.125
"""MiB per bucket: the model fits in one, or is many times what an engine's end may hold"""
LAST = 6
"""The last bucket of the model when it is streamed; after it only the trailer is lacking."""

pytestmark = pytest.mark.parametrize("transport", ["broadcast", "p2p", "shared"])
both_sizes = pytest.mark.parametrize(
    "bucket_mib", [pytest.param(WHOLE, id="whole"), pytest.param(STREAMED, id="streamed")]
)
one_and_three = pytest.mark.parametrize("num_engines", [1, 3])


@pytest.fixture(autouse=True)
def _layers_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of both kinds of pieces: large tensors, from where they are, and packed ones."""
    monkeypatch.setattr(pieces, "LARGE_BYTES", 2**17)


class Fleet:
    """A sender and its engines in one process."""

    def __init__(
        self,
        transport: str,
        num_engines: int = 1,
        *,
        bucket_mib: float = WHOLE,
        staging_mib: float | None = None,
        timeout_s: float = 30.0,
        verify: bool = True,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.config = WeightsConfig(
            transport="broadcast" if transport == "shared" else transport,
            shared_memory=transport == "shared",  # from the second version on
            bucket_mib=bucket_mib,
            staging_mib=staging_mib or 2 * bucket_mib,
            timeout_s=timeout_s,
            verify=verify,
        )
        self.source = FakeSource(make_tensors(1), aliases)
        self.sender = open_sender(self.config, "127.0.0.1", self.source)
        self.sinks: dict[str, FakeSink] = {}
        self.receivers: dict[str, WeightReceiver] = {}
        self.version = 0
        for _ in range(num_engines):
            self.add(FakeSink(self.source.tensors, aliases))

    def add(self, sink: FakeSink) -> str:
        name = f"rollout-{len(self.sinks)}/a"
        self.sinks[name] = sink
        self.receivers[name] = open_receiver(self.config)
        return name

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for receiver in self.receivers.values():
            await receiver.close()
        await self.sender.close()

    def start(
        self, names: Sequence[str] | None = None, absent: Sequence[str] = ()
    ) -> tuple[asyncio.Task[SendReport], dict[str, asyncio.Task[LoadReport]]]:
        """Publish the next version, with new values."""
        _, _, send, loads = self.begin(names, absent)
        return send, loads

    def begin(
        self,
        names: Sequence[str] | None = None,
        absent: Sequence[str] = (),
        *,
        catch_up: bool = False,
    ) -> tuple[WeightManifest, Mapping[str, WeightRoute], asyncio.Task[SendReport], Loads]:
        names = list(self.sinks) if names is None else names
        if not catch_up:
            self.version += 1
            self.source.tensors = make_tensors(self.version)
        manifest, routes = self.sender.plan(1, self.version, self.version, names, catch_up=catch_up)
        loads = {
            name: asyncio.create_task(self.receive(name, manifest, routes))
            for name in names
            if name not in absent
        }
        return manifest, routes, asyncio.create_task(self.sender.send(manifest)), loads

    async def receive(
        self, name: str, manifest: WeightManifest, routes: Mapping[str, WeightRoute]
    ) -> LoadReport:
        return await self.receivers[name].receive(
            manifest, routes[name], self.sinks[name], "in_place"
        )

    async def sync(
        self, names: Sequence[str] | None = None, absent: Sequence[str] = ()
    ) -> tuple[SendReport | BaseException, list[LoadReport | BaseException]]:
        send, loads = self.start(names, absent)
        sent, *loaded = await asyncio.gather(send, *loads.values(), return_exceptions=True)
        return sent, loaded

    async def sync_well(self, names: Sequence[str] | None = None) -> str:
        """Publish the next version; every engine must hold it."""
        sent, loaded = await self.sync(names)
        assert isinstance(sent, SendReport), sent
        bucket_bytes = int(self.config.bucket_mib * 2**20)
        assert sent.digest == digest_of_tensors(self.source.tensors, bucket_bytes)
        for name, report in zip(names or self.sinks, loaded, strict=True):
            assert isinstance(report, LoadReport), report
            assert report.digest == sent.digest
            sink = self.sinks[name]
            assert sink.version == self.version
            assert not sink.paused
            for key in sink.tensors:
                expected = self.source.tensors[self.source.aliases.get(key, key)]
                assert torch.equal(sink.tensors[key], expected), key
        return sent.digest


def run(main: Callable[[], Any], limit_s: float = 30.0) -> None:
    """Run a test's coroutine; the limit is for a test that hangs, not for one that is slow."""

    async def limited() -> None:
        async with asyncio.timeout(limit_s):
            await main()

    asyncio.run(limited())


def within(seconds: float) -> asyncio.Timeout:
    return asyncio.timeout(seconds)


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

    def flip(bucket: torch.Tensor, arriving: Iterable[TensorSlot]) -> Arrived:
        if next(calls) == 0:
            arriving = list(arriving)
            bucket[70] ^= 1
        return inspect(bucket, arriving)

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


@both_sizes
@pytest.mark.parametrize("method", ["pause", "write", "read", "stamp"])
def test_an_engine_that_fails_is_resumed_and_the_others_go_on(
    transport: str, bucket_mib: float, method: str
) -> None:
    async def main() -> None:
        async with Fleet(transport, 3, bucket_mib=bucket_mib) as fleet:
            await fleet.sync_well()
            _, bad, _ = fleet.sinks.values()
            bad.fail_in = method
            sent, loaded = await fleet.sync()
            assert isinstance(sent, SendReport)
            assert isinstance(loaded[0], LoadReport)
            assert isinstance(loaded[2], LoadReport)
            assert str(loaded[1]) == f"the engine fails in {method}"
            assert not bad.paused
            assert bad.version == (1 if method == "pause" else None)
            bad.fail_in = None
            await fleet.sync_well()

    run(main)


def test_an_engine_that_fails_in_the_middle_of_a_stream_does_not_hold_the_others(
    transport: str,
) -> None:
    async def main() -> None:
        async with Fleet(transport, 3, bucket_mib=STREAMED) as fleet:
            bad = next(iter(fleet.sinks.values()))
            bad.fail_in, bad.fail_after = "write", 2
            sent, loaded = await fleet.sync()
            assert isinstance(sent, SendReport)
            assert isinstance(loaded[0], RuntimeError)
            assert all(isinstance(report, LoadReport) for report in loaded[1:])
            bad.fail_in = None
            await fleet.sync_well()

    run(main)


def test_an_engine_that_does_not_come_costs_the_others_nothing_but_time(transport: str) -> None:
    async def main() -> None:
        async with Fleet(transport, 3, timeout_s=4.0) as fleet:
            absent = list(fleet.sinks)[1]
            sent, loaded = await fleet.sync(absent=[absent])
            assert isinstance(sent, SendReport)
            assert sent.lost == {absent: "it did not come to the transfer within 1 s"}
            assert all(isinstance(report, LoadReport) for report in loaded)
            assert fleet.sinks[absent].events == []
            await fleet.sync_well()

    run(main)


def test_an_engine_that_comes_too_late_is_told_so(transport: str) -> None:
    async def main() -> None:
        async with Fleet(transport, 2, timeout_s=2.0) as fleet:
            late, _ = fleet.sinks
            manifest, routes, send, loads = fleet.begin(absent=[late])
            sent, *_ = await asyncio.gather(send, *loads.values())
            assert list(sent.lost) == [late]
            async with within(1):  # long before its own deadline
                with pytest.raises(TransferFailed, match="goes on without this engine: it did not"):
                    await fleet.receive(late, manifest, routes)
            assert fleet.sinks[late].events == []
            await fleet.sync_well()

    run(main)


def test_an_engine_that_left_is_not_waited_for(transport: str) -> None:
    async def main() -> None:
        async with Fleet(transport, 3, timeout_s=60.0) as fleet:
            gone, never, _ = fleet.sinks
            send, loads = fleet.start(absent=[gone, never])
            await asyncio.sleep(0)
            fleet.sender.leave(gone, "its process is dead")
            fleet.sender.leave(never, "it refused")
            fleet.sender.leave(never, "told twice")
            async with within(10):  # of the 15 s that it has
                sent, *loaded = await asyncio.gather(send, *loads.values())
            assert sent.lost == {gone: "its process is dead", never: "it refused"}
            assert all(isinstance(report, LoadReport) for report in loaded)
            fleet.sender.leave(gone, "of a transfer that is over")
            await fleet.sync_well()

    run(main)


def test_a_transfer_that_arrives_nowhere_fails_and_names_everyone(transport: str) -> None:
    async def main() -> None:
        async with Fleet(transport, 2, timeout_s=10.0) as fleet:
            send, _ = fleet.start(absent=list(fleet.sinks))
            for name in fleet.sinks:
                fleet.sender.leave(name, f"{name} refused")
            with pytest.raises(TransferFailed) as failed:
                await send
            for name in fleet.sinks:
                assert f"{name}: {name} refused" in str(failed.value)
            await fleet.sync_well()

    run(main)


def test_membership_changes(transport: str) -> None:
    async def main() -> None:
        async with Fleet(transport, 3) as fleet:
            a, b, c = fleet.sinks
            for names in ([a], [a, b], [a, b, c], [c, b, a], [b], [b, c], [b, c], [a, b, c]):
                await fleet.sync_well(names)
            late = fleet.add(FakeSink(fleet.source.tensors))
            await fleet.sync_well([late])
            await fleet.sync_well()

    run(main)


def test_an_engine_starts_again_under_a_new_incarnation(transport: str) -> None:
    async def main() -> None:
        async with Fleet(transport, 2) as fleet:
            await fleet.sync_well()
            first, second = fleet.sinks
            await fleet.receivers[second].close()
            again = second.replace("/a", "/b")
            fleet.sinks = {first: fleet.sinks[first], again: FakeSink(fleet.source.tensors)}
            fleet.receivers[again] = open_receiver(fleet.config)
            await fleet.sync_well()

    run(main)


def test_an_engine_that_lost_its_receiver_rejoins_under_the_same_name(transport: str) -> None:
    """Both ends must agree that they hold the same group before they use it."""

    async def main() -> None:
        async with Fleet(transport, 2) as fleet:
            await fleet.sync_well()
            name = next(iter(fleet.sinks))
            await fleet.receivers[name].close()
            fleet.receivers[name] = open_receiver(fleet.config)
            await fleet.sync_well()

    run(main)


def test_a_trainer_takes_over_with_another_sender(transport: str) -> None:
    async def main() -> None:
        async with Fleet(transport, 2) as fleet:
            await fleet.sync_well()
            await fleet.sender.close()
            fleet.sender = open_sender(fleet.config, "127.0.0.1", fleet.source)
            await fleet.sync_well()

    run(main)


def test_abort_ends_a_load_that_waits_for_the_trainer(transport: str) -> None:
    async def main() -> None:
        async with Fleet(transport, 2) as fleet:
            await fleet.sync_well()
            absent, here = fleet.sinks
            send, loads = fleet.start(absent=[absent])
            await asyncio.sleep(0)
            fleet.receivers[here].abort("another engine is gone")
            fleet.receivers[here].abort("told twice")
            async with within(1):
                with pytest.raises(TransferFailed, match="another engine is gone"):
                    await loads[here]
            send.cancel()
            await asyncio.wait([send])
            await fleet.sync_well()

    run(main)


@both_sizes
def test_abort_in_the_middle_of_a_transfer(transport: str, bucket_mib: float) -> None:
    async def main() -> None:
        async with Fleet(transport, 2, bucket_mib=bucket_mib) as fleet:
            await fleet.sync_well()
            go_on, reached = threading.Event(), threading.Event()
            calls: list[int] = []

            def stop(names: Sequence[str]) -> None:
                calls.append(1)
                if len(calls) == nth:
                    reached.set()
                    assert go_on.wait(20)

            nth = 1 if bucket_mib == WHOLE else 5
            fleet.source.on_read = stop
            for sink in fleet.sinks.values():
                sink.entered.clear()
            send, loads = fleet.start()
            await asyncio.to_thread(reached.wait, 10)
            if bucket_mib == STREAMED:
                for sink in fleet.sinks.values():
                    await sink.entered["write"].wait()
            for name in fleet.sinks:
                fleet.receivers[name].abort("the trainer is gone")
                fleet.receivers[name].abort("harmless")
            async with within(1):  # the connections are still open, the sender still holds them
                results = await asyncio.gather(*loads.values(), return_exceptions=True)
            assert [str(result) for result in results] == ["the trainer is gone"] * 2
            assert all(isinstance(result, TransferFailed) for result in results)
            for sink in fleet.sinks.values():
                assert not sink.paused
                assert sink.version == (1 if bucket_mib == WHOLE else None)
            go_on.set()
            await asyncio.gather(send, return_exceptions=True)  # well or not: nobody took it
            fleet.source.on_read = lambda names: None
            await fleet.sync_well()

    run(main)


def test_an_aborted_version_is_never_stamped(transport: str) -> None:
    async def main() -> None:
        async with Fleet(transport) as fleet:
            ((name, sink),) = fleet.sinks.items()
            sink.on["read"] = lambda: fleet.receivers[name].abort("the version is burnt")
            sent, (loaded,) = await fleet.sync()
            assert isinstance(sent, SendReport)
            assert str(loaded) == "the version is burnt"
            assert sink.version is None
            assert "stamp" not in sink.events
            assert not sink.paused
            del sink.on["read"]
            await fleet.sync_well()

    run(main)


def test_an_abort_after_the_stamp_is_too_late(transport: str) -> None:
    async def main() -> None:
        async with Fleet(transport) as fleet:
            ((name, sink),) = fleet.sinks.items()
            fleet.receivers[name].abort("there is nothing to abort")
            sink.on["stamp"] = lambda: fleet.receivers[name].abort("too late")
            await fleet.sync_well()
            fleet.receivers[name].abort("there is nothing to abort")
            await fleet.sync_well()

    run(main)


def test_a_cancelled_load_resumes_its_engine(transport: str) -> None:
    async def main() -> None:
        async with Fleet(transport) as fleet:
            (sink,) = fleet.sinks.values()
            sink.hold["write"] = asyncio.Event()
            send, loads = fleet.start()
            await sink.entered["write"].wait()
            assert sink.paused
            (load,) = loads.values()
            load.cancel()
            await asyncio.wait([load, send])
            assert load.cancelled()
            assert not sink.paused
            sink.hold.clear()
            await fleet.sync_well()

    run(main)


def test_a_cancelled_send_frees_the_engines(transport: str) -> None:
    async def main() -> None:
        async with Fleet(transport, 2) as fleet:
            await fleet.sync_well()
            absent, here = fleet.sinks
            send, loads = fleet.start(absent=[absent])
            await asyncio.sleep(0)
            send.cancel()
            async with within(2):
                with pytest.raises(TransferFailed, match="given up"):
                    await loads[here]
                await asyncio.wait([send])
            assert send.cancelled()
            await fleet.sync_well()

    run(main)


@both_sizes
def test_a_send_cancelled_in_the_middle_is_not_completed(transport: str, bucket_mib: float) -> None:
    """Its thread was reading, and comes back to a transfer that nobody wants any more."""

    async def main() -> None:
        async with Fleet(transport, 2, bucket_mib=bucket_mib) as fleet:
            await fleet.sync_well()
            go_on, reached = threading.Event(), threading.Event()

            def wait(names: Sequence[str]) -> None:
                reached.set()
                assert go_on.wait(20)

            fleet.source.on_read = wait
            send, loads = fleet.start()
            await asyncio.to_thread(reached.wait, 10)
            send.cancel()
            await asyncio.wait([send])
            go_on.set()
            async with within(5):
                results = await asyncio.gather(*loads.values(), return_exceptions=True)
            assert all(isinstance(result, TransferFailed) for result in results)
            assert all(sink.version == 1 for sink in fleet.sinks.values())
            fleet.source.on_read = lambda names: None
            await fleet.sync_well()

    run(main)


@both_sizes
def test_a_trainer_that_cannot_read_frees_the_engines(transport: str, bucket_mib: float) -> None:
    async def main() -> None:
        async with Fleet(transport, 3, bucket_mib=bucket_mib) as fleet:
            await fleet.sync_well()
            calls: list[int] = []

            def fail(names: Sequence[str]) -> None:
                calls.append(1)
                if len(calls) == (1 if bucket_mib == WHOLE else 5):
                    msg = "out of memory"
                    raise RuntimeError(msg)

            fleet.source.on_read = fail
            async with within(5):
                sent, loaded = await fleet.sync()
            assert str(sent) == "out of memory"
            assert all(isinstance(report, TransferFailed) for report in loaded)
            assert not any(sink.paused for sink in fleet.sinks.values())
            fleet.source.on_read = lambda names: None
            await fleet.sync_well()

    run(main)


def test_a_tensor_that_is_not_as_announced_is_not_converted(transport: str) -> None:
    async def main() -> None:
        async with Fleet(transport) as fleet:
            source = fleet.source
            specs = source.specs()
            source.specs = lambda: specs  # type: ignore[method-assign]

            def widen(names: Sequence[str]) -> None:
                source.tensors["layers.0.weight"] = source.tensors["layers.0.weight"].float()

            source.on_read = widen
            async with within(3):
                sent, (loaded,) = await fleet.sync()
            assert isinstance(sent, TransferFailed)
            assert "layers.0.weight" in str(sent)
            assert isinstance(loaded, TransferFailed)

    run(main)


@pytest.mark.parametrize("method", ["pause", "write", "read"])
def test_an_engine_that_hangs_ends_by_the_deadline(transport: str, method: str) -> None:
    async def main() -> None:
        async with Fleet(transport, 2, timeout_s=1.0) as fleet:
            await fleet.sync_well()
            stuck, well = fleet.sinks.values()
            stuck.hold[method] = asyncio.Event()
            async with within(3):
                sent, (late, loaded) = await fleet.sync()
            assert isinstance(sent, SendReport)
            assert isinstance(loaded, LoadReport)
            assert isinstance(late, TransferFailed)
            assert str(late) == "version 2 was not loaded within 1 s"
            assert not stuck.paused
            assert stuck.version == (1 if method == "pause" else None)
            stuck.hold.clear()
            await fleet.sync_well()
            assert well.version == fleet.version

    run(main)


def test_the_event_loop_goes_on_while_the_trainer_reads(transport: str) -> None:
    """The read ends only when the loop, which would be blocked by it, says so."""

    async def main() -> None:
        async with Fleet(transport) as fleet:
            go_on, reached = threading.Event(), threading.Event()

            def wait(names: Sequence[str]) -> None:
                reached.set()
                assert go_on.wait(20)

            fleet.source.on_read = wait
            send, loads = fleet.start()
            await asyncio.to_thread(reached.wait, 10)
            go_on.set()
            await asyncio.gather(send, *loads.values())

    run(main)


def test_a_trainer_that_reads_for_ever_ends_by_the_deadline(transport: str) -> None:
    async def main() -> None:
        async with Fleet(transport, timeout_s=0.5) as fleet:
            go_on = threading.Event()
            fleet.source.on_read = lambda names: assert_true(go_on.wait(20))
            async with within(4):
                sent, (loaded,) = await fleet.sync()
            assert isinstance(sent, TransferFailed)
            assert "could not be read in time" in str(sent)
            assert isinstance(loaded, TransferFailed)
            go_on.set()
            fleet.source.on_read = lambda names: None
            await fleet.sync_well()

    run(main)


def assert_true(value: bool) -> None:
    assert value


def test_a_second_load_at_the_same_time_is_refused(transport: str) -> None:
    async def main() -> None:
        async with Fleet(transport, 2) as fleet:
            absent, here = fleet.sinks
            send, loads = fleet.start(absent=[absent])
            await asyncio.sleep(0)
            send.cancel()
            send_again, again = fleet.start([here])
            with pytest.raises(TransferFailed, match="abort that first"):
                await again[here]
            with pytest.raises(TransferFailed, match="given up"):
                await loads[here]
            send_again.cancel()
            await asyncio.wait([send, send_again])

    run(main)


def test_nothing_is_sent_to_nobody(transport: str) -> None:
    async def main() -> None:
        async with Fleet(transport, 0) as fleet:
            with pytest.raises(TransferFailed, match="no engine"):
                fleet.sender.plan(1, 5, 5, [])

    run(main)


def test_only_the_last_plan_is_sent(transport: str) -> None:
    async def main() -> None:
        async with Fleet(transport) as fleet:
            old, _ = fleet.sender.plan(1, 5, 5, list(fleet.sinks))
            fleet.sender.plan(1, 6, 6, list(fleet.sinks))
            with pytest.raises(RuntimeError, match="version 5"):
                await fleet.sender.send(old)
            assert isinstance(old, WeightManifest)
            await fleet.sync_well()

    run(main)


def test_an_engine_says_that_nobody_serves(transport: str) -> None:
    async def main() -> None:
        async with Fleet(transport) as fleet:
            manifest, routes = fleet.sender.plan(1, 1, 1, list(fleet.sinks))
            await fleet.sender.close()
            ((name, sink),) = fleet.sinks.items()
            async with within(3):
                with pytest.raises(TransferFailed, match="no trainer serves"):
                    await fleet.receivers[name].receive(manifest, routes[name], sink, "in_place")
            assert sink.events == []
            fleet.sender = open_sender(fleet.config, "127.0.0.1", fleet.source)
            await fleet.sync_well()

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


def hang(receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch, at: int) -> threading.Event:
    """Let an engine's thread stand still when it has received so many buckets of its next load, as
    a stopped process does; return what lets it go on.
    """
    go_on = threading.Event()
    calls = itertools.count()

    def stop() -> None:
        if next(calls) == at:
            assert go_on.wait(60)

    _on_bucket(receiver, monkeypatch, stop)
    return go_on


def kill(receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Let an engine's end break down in the middle, without a word, as a killed process does."""
    calls = itertools.count()

    def die() -> None:
        if next(calls) == at:
            msg = "killed"
            raise RuntimeError(msg)

    _on_bucket(receiver, monkeypatch, die)


def _on_bucket(
    receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]
) -> None:
    receive, mine = receiver.receive, set[Inbox]()
    make, put = Inbox.__init__, Inbox.put_bucket

    def put_bucket(inbox: Inbox, arrived: Arrived) -> None:
        if inbox in mine:
            act()
        put(inbox, arrived)

    async def receive_here(*args: Any) -> LoadReport:
        task = asyncio.current_task()

        def make_here(inbox: Inbox, *args: Any, **rest: Any) -> None:
            make(inbox, *args, **rest)
            if asyncio.current_task() is task:
                mine.add(inbox)

        monkeypatch.setattr(Inbox, "__init__", make_here)
        monkeypatch.setattr(receiver, "receive", receive)
        return await receive(*args)

    monkeypatch.setattr(receiver, "receive", receive_here)
    monkeypatch.setattr(Inbox, "put_bucket", put_bucket)


@pytest.mark.parametrize("at", [0, 5, LAST])
@pytest.mark.parametrize(
    ("place", "staging_mib"),
    [(0, None), (1, None), (2, None), pytest.param(1, WHOLE, id="1-staged")],
)
def test_an_engine_killed_in_the_middle_costs_the_others_nothing(
    transport: str,
    place: int,
    staging_mib: float | None,
    at: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with Fleet(
            transport, 3, bucket_mib=STREAMED, staging_mib=staging_mib, timeout_s=60.0
        ) as fleet:
            sent_before, _ = await fleet.sync()
            assert isinstance(sent_before, SendReport)
            dead = list(fleet.sinks)[place]
            assert sent_before.num_buckets == LAST + 1
            kill(fleet.receivers[dead], monkeypatch, at)
            reads = Counter[str]()
            fleet.source.on_read = reads.update
            send, loads = fleet.start()
            with pytest.raises(RuntimeError, match="killed"):
                await loads[dead]
            fleet.sender.leave(dead, "its process is dead")
            async with within(10):
                sent, *rest = await asyncio.gather(
                    send, *(load for name, load in loads.items() if name != dead)
                )
            assert list(sent.lost) == [dead]
            assert "its process is dead" in sent.lost[dead]
            assert all(report.digest == sent.digest for report in rest)
            if transport == "broadcast" and at:
                assert reads["layers.0.weight"] == 1, "it goes on where it broke"
            for name, sink in fleet.sinks.items():
                assert sink.version == (fleet.version if name != dead else sink.version)
                assert not sink.paused
            assert fleet.sinks[dead].version in (1, None)
            await fleet.sync_well()

    run(main)


def test_an_engine_that_hangs_in_the_middle_fails_its_own_part(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody tells the trainer: it finds out in time for the others, and the lost one is told."""

    async def main() -> None:
        async with Fleet(transport, 3, bucket_mib=STREAMED, timeout_s=4.0) as fleet:
            await fleet.sync_well()
            _, stuck, _ = fleet.sinks
            go_on = hang(fleet.receivers[stuck], monkeypatch, 4)
            send, loads = fleet.start()
            async with within(4):
                sent = await send
            assert list(sent.lost) == [stuck]
            did = (
                "took no bucket for"
                if transport == "shared"
                else "did not come to the transfer within"
            )
            go_on.set()
            assert f"{did} 1 s" in sent.lost[stuck]
            async with within(1):
                _, late, _ = await asyncio.gather(*loads.values(), return_exceptions=True)
            assert isinstance(late, TransferFailed)
            assert "goes on without this engine" in str(late)
            for name, sink in fleet.sinks.items():
                assert sink.version == (None if name == stuck else fleet.version)
                assert not sink.paused
            await fleet.sync_well()

    run(main)


@pytest.mark.soak
def test_an_engine_that_takes_nothing_more_says_so(transport: str) -> None:
    async def main() -> None:
        async with Fleet(transport, 3, bucket_mib=STREAMED, timeout_s=4.0) as fleet:
            await fleet.sync_well()
            _, stuck, _ = fleet.sinks
            fleet.sinks[stuck].hold["write"] = asyncio.Event()
            async with within(6):
                sent, (_, late, _) = await fleet.sync()
            assert isinstance(sent, SendReport)
            assert list(sent.lost) == [stuck]
            did = "took no bucket for" if transport == "shared" else "did not take a bucket within"
            assert f"{did} 1 s" in sent.lost[stuck]
            assert isinstance(late, TransferFailed)
            for name, sink in fleet.sinks.items():
                assert sink.version == (None if name == stuck else fleet.version)
                assert not sink.paused
            fleet.sinks[stuck].hold.clear()
            await fleet.sync_well()

    run(main)


@pytest.mark.soak
def test_an_engine_that_hangs_for_a_moment_gets_its_version(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket is given up for it, and it comes back before it is; or it is waited for."""

    async def main() -> None:
        async with Fleet(transport, 2, bucket_mib=STREAMED, timeout_s=6.0) as fleet:
            await fleet.sync_well()
            name = next(iter(fleet.sinks))
            go_on = hang(fleet.receivers[name], monkeypatch, 4)
            send, loads = fleet.start()
            moment = 0.7 if transport == "shared" else 2.2  # there is one round only
            asyncio.get_running_loop().call_later(moment, go_on.set)
            sent, *_ = await asyncio.gather(send, *loads.values())
            assert sent.lost == {}
            assert {sink.version for sink in fleet.sinks.values()} == {fleet.version}
            await fleet.sync_well()

    run(main)


def test_staging_memory_is_two_buckets_at_either_end_after_a_break_too(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    buffers = Staging.buffers

    def counted(staging: Staging, sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
        held = buffers(staging, sizes, device)
        assert len(held) == 2
        made.extend({buffer.data_ptr() for buffer in held} - set(made))
        return held

    async def main() -> None:
        async with Fleet(transport, 3, bucket_mib=STREAMED) as fleet:
            monkeypatch.setattr(Staging, "buffers", counted)
            await fleet.sync_well()
            dead = list(fleet.sinks)[1]
            kill(fleet.receivers[dead], monkeypatch, 4)
            send, loads = fleet.start()
            await asyncio.wait([loads[dead]])
            fleet.sender.leave(dead, "dead")
            await asyncio.gather(send, *loads.values(), return_exceptions=True)
            assert len(made) == 2 * (1 + 3)

    run(main)


@pytest.mark.parametrize("num_engines", [1, 3])
def test_catching_up_leaves_the_others_and_their_group_alone(
    transport: str, num_engines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    make = GlooGroup.__init__

    def counted(group: GlooGroup, store: Any, name: str, rank: int, size: int, **rest: Any) -> None:
        make(group, store, name, rank, size, **rest)
        if rank == 0:
            built.append(name)

    monkeypatch.setattr(GlooGroup, "__init__", counted)

    async def main() -> None:
        async with Fleet(transport, num_engines, bucket_mib=STREAMED) as fleet:
            await fleet.sync_well()
            at_first = list(built)
            events = {name: list(sink.events) for name, sink in fleet.sinks.items()}
            late = fleet.add(FakeSink(fleet.source.tensors))
            _, routes, send, loads = fleet.begin([late], catch_up=True)
            assert {route.transport for route in routes.values()} == {"p2p"}
            sent, report = await asyncio.gather(send, *loads.values())
            assert report.digest == sent.digest
            assert fleet.sinks.pop(late).version == fleet.version
            assert events == {name: sink.events for name, sink in fleet.sinks.items()}
            await fleet.sync_well()
            assert len(built) == len(at_first) + 1, "the next transfer went through what was held"
            last = next(reversed(fleet.sinks))
            *_, send, loads = fleet.begin([last], catch_up=True)  # a member of the held group
            await asyncio.gather(send, *loads.values())
            before = len(built)
            await fleet.sync_well()
            assert len(built) == before

    run(main)


def test_pairs_do_not_wait_for_one_that_hangs(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if transport != "p2p":
        pytest.skip("a group that broadcasts finds out by the deadline of a bucket")

    async def main() -> None:
        async with Fleet(transport, 3, bucket_mib=STREAMED, timeout_s=60.0) as fleet:
            await fleet.sync_well()
            stuck, *others = fleet.sinks
            go_on = hang(fleet.receivers[stuck], monkeypatch, 2)
            send, loads = fleet.start()
            async with within(10):  # of the 15 s until its bucket is given up
                await asyncio.gather(*(loads[name] for name in others))
            assert not send.done()
            go_on.set()
            sent, _ = await asyncio.gather(send, loads[stuck])
            assert sent.lost == {}, "slow, but not lost"
            assert {sink.version for sink in fleet.sinks.values()} == {fleet.version}

    run(main)
