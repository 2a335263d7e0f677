"""Every weight transport: loads and sends that are aborted, cancelled, or out of time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from tests.helpers.transport_fleet import (
    STREAMED,
    WHOLE,
    Fleet,
    both_sizes,
    every_transport,
    run,
    within,
)

from ratchet.errors import TransferFailed
from ratchet.transport.weights.base import SendReport

pytestmark = every_transport


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
        # the sender hears of it from nobody, and waits a quarter of this for room in shared memory
        async with Fleet(transport, 2, bucket_mib=bucket_mib, timeout_s=12.0) as fleet:
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
            go_on, reached = threading.Event(), threading.Event()

            def wait(names: Sequence[str]) -> None:
                reached.set()
                assert go_on.wait(20)

            fleet.source.on_read = wait
            absent, here = fleet.sinks
            send, loads = fleet.start(absent=[absent])
            await asyncio.to_thread(reached.wait, 10)  # else it may be there before the end
            send.cancel()
            async with within(2):
                with pytest.raises(TransferFailed, match="given up"):
                    await loads[here]
                await asyncio.wait([send])
            assert send.cancelled()
            go_on.set()
            fleet.source.on_read = lambda names: None
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
            go_on, reached = threading.Event(), threading.Event()

            def wait(names: Sequence[str]) -> None:
                reached.set()
                assert go_on.wait(20)

            fleet.source.on_read = wait
            manifest, routes, send, loads = fleet.begin()
            await asyncio.to_thread(reached.wait, 10)
            here, other = loads
            with pytest.raises(TransferFailed, match="abort that first"):
                await fleet.receive(here, manifest, routes)
            assert not loads[here].done(), "the first one goes on"
            go_on.set()
            await asyncio.gather(send, loads[here], loads[other])

    run(main)
