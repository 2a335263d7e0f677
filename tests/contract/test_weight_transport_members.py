"""Every weight transport: engines that come, fail, leave, and come back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.helpers.transport_fleet import STREAMED, Fleet, both_sizes, every_transport, run, within
from tests.helpers.weights import FakeSink

from ratchet.errors import TransferFailed
from ratchet.transport.weights.base import LoadReport, SendReport
from ratchet.transport.weights.groups import GlooGroup
from ratchet.transport.weights.registry import open_receiver, open_sender
from ratchet.types import WeightManifest

pytestmark = every_transport


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
