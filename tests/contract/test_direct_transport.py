"""The direct transport: servers in groups with the trainer hold what was sent, whatever becomes of
one of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from tests.helpers.outside_server import ServedSink
from tests.helpers.weights import FakeSink, FakeSource, digest_of_tensors, make_tensors

from ratchet.config import WeightsConfig
from ratchet.errors import TransferFailed, WeightsMismatch
from ratchet.transport.weights.base import LoadReport, SendReport, WeightReceiver
from ratchet.transport.weights.registry import open_receiver, open_sender
from ratchet.types import WeightManifest, WeightRoute

BUCKET_MIB = 0.125
ORDER = ["pause", "begin", "load", "stamp", "resume"]


class Fleet:
    """A sender, and engines with servers of so many ranks."""

    def __init__(self, *engines: Sequence[int], timeout_s: float = 30.0) -> None:
        self.config = WeightsConfig(transport="direct", bucket_mib=BUCKET_MIB, timeout_s=timeout_s)
        self.source = FakeSource(make_tensors(1))
        self.sender = open_sender(self.config, "127.0.0.1", self.source)
        self.sinks: dict[str, FakeSink] = {}
        self.receivers: dict[str, WeightReceiver] = {}
        self.version = 0
        for sizes in engines:
            self.add(sizes)

    def add(self, sizes: Sequence[int]) -> str:
        name = f"rollout-{len(self.sinks)}/a"
        self.sinks[name] = ServedSink(self.source.tensors, sizes)
        self.receivers[name] = open_receiver(self.config)
        return name

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for receiver in self.receivers.values():
            await receiver.close()
        await self.sender.close()
        for sink in self.sinks.values():
            if isinstance(sink, ServedSink) and sink.outside is not None:
                sink.outside.end()

    def begin(
        self, *names: str, catch_up: bool = False
    ) -> tuple[asyncio.Task[SendReport], dict[str, asyncio.Task[LoadReport]]]:
        if not catch_up:
            self.version += 1
            self.source.tensors = make_tensors(self.version)
        manifest, routes = self.sender.plan(
            1, self.version, self.version, names or tuple(self.sinks), catch_up=catch_up
        )
        loads = {name: asyncio.create_task(self.receive(name, manifest, routes)) for name in routes}
        return asyncio.create_task(self.sender.send(manifest)), loads

    async def receive(
        self, name: str, manifest: WeightManifest, routes: Mapping[str, WeightRoute]
    ) -> LoadReport:
        route, sink = routes[name], self.sinks[name]
        return await self.receivers[name].receive(manifest, route, sink, "in_place")

    async def sync(self, *names: str, catch_up: bool = False) -> tuple[Any, list[Any]]:
        send, loads = self.begin(*names, catch_up=catch_up)
        sent, *loaded = await asyncio.gather(send, *loads.values(), return_exceptions=True)
        return sent, loaded

    async def sync_well(self, *names: str, catch_up: bool = False) -> None:
        sent, loaded = await self.sync(*names, catch_up=catch_up)
        assert isinstance(sent, SendReport), sent
        assert not sent.lost
        for name, report in zip(names or self.sinks, loaded, strict=True):
            assert isinstance(report, LoadReport), report
            await self.holds(name, sent, report)

    async def holds(self, name: str, sent: SendReport, report: LoadReport) -> None:
        expected = digest_of_tensors(self.source.tensors, int(BUCKET_MIB * 2**20))
        assert report.digest == sent.digest == expected
        sink = self.sinks[name]
        assert isinstance(sink, ServedSink)
        assert sink.outside is not None
        assert (sink.version, sink.paused) == (self.version, False)
        await sink.outside.hold(self.source.tensors)


def run(main: Callable[[], Any], limit_s: float = 60.0) -> None:
    async def limited() -> None:
        async with asyncio.timeout(limit_s):
            await main()

    asyncio.run(limited())


def events(fleet: Fleet, name: str) -> list[str]:
    return list(dict.fromkeys(fleet.sinks[name].events))


def test_every_rank_of_every_server_holds_what_was_sent_and_groups_are_kept() -> None:
    async def main() -> None:
        async with Fleet([1], [2, 1]) as fleet:
            for _ in range(3):
                await fleet.sync_well()
            for name, sink in fleet.sinks.items():
                assert events(fleet, name) == ["join", *ORDER]
                assert sink.events.count("join") == len(sink.outside.sizes)  # type: ignore[attr-defined]

    run(main)


def test_a_late_engine_catches_up_and_stays_in_its_group() -> None:
    async def main() -> None:
        async with Fleet([1]) as fleet:
            await fleet.sync_well()
            late = fleet.add([1])
            await fleet.sync_well(late, catch_up=True)
            await fleet.sync_well()
            assert all(sink.events.count("join") == 1 for sink in fleet.sinks.values())

    run(main)


def test_a_server_killed_in_the_middle_costs_its_engine_alone() -> None:
    async def main() -> None:
        async with Fleet([2], [1]) as fleet:
            await fleet.sync_well()
            bad, good = fleet.sinks
            servers = fleet.sinks[bad].outside  # type: ignore[attr-defined]
            servers.kill_at = servers.loads + 3
            sent, (lost, loaded) = await fleet.sync()
            assert isinstance(sent, SendReport)
            assert list(sent.lost) == [bad]
            assert isinstance(lost, TransferFailed)
            assert (fleet.sinks[bad].version, fleet.sinks[bad].paused) == (None, False)
            await fleet.holds(good, sent, loaded)
            await fleet.sync_well(good)

    run(main)


def test_an_engine_that_fails_leaves_its_group_and_comes_back_in_a_new_one() -> None:
    async def main() -> None:
        async with Fleet([1]) as fleet:
            await fleet.sync_well()
            (name,) = fleet.sinks
            sink = fleet.sinks[name]
            sink.fail_in = "stamp"
            _, (failed,) = await fleet.sync()
            assert str(failed) == "the engine fails in stamp"
            assert sink.version is None
            sink.fail_in = None
            await fleet.sync_well(catch_up=True)
            assert sink.events.count("leave") == 1
            assert sink.events.count("join") == 2
            (held,) = await sink.outside.ranks[0][0].call("held")  # type: ignore[attr-defined]
            assert held

    run(main)


def test_an_abort_ends_the_load_at_once_and_the_trainer_frees_the_server() -> None:
    async def main() -> None:
        async with Fleet([2], timeout_s=4.0) as fleet:
            await fleet.sync_well()
            (name,) = fleet.sinks
            servers = fleet.sinks[name].outside  # type: ignore[attr-defined]
            one, other = servers.ranks[0]
            one.stop()
            fleet.sinks[name].entered["load"].clear()
            send, loads = fleet.begin()
            await fleet.sinks[name].entered["load"].wait()
            fleet.receivers[name].abort("enough")
            with pytest.raises(TransferFailed, match="enough"):
                await loads[name]
            with pytest.raises(TransferFailed):
                await send
            assert await other.call("held"), "it answers again"

    run(main)


def test_parameters_are_checked_before_a_group_is_formed() -> None:
    async def main() -> None:
        async with Fleet([1], [1]) as fleet:
            good, bad = fleet.sinks
            fleet.sinks[bad].tensors["layers.0.weight"] = make_tensors(1, wide=4)["layers.0.weight"]
            sent, (loaded, refused) = await fleet.sync()
            assert isinstance(refused, WeightsMismatch)
            assert "layers.0.weight" in sent.lost[bad]
            assert events(fleet, bad) == []
            await fleet.holds(good, sent, loaded)

    run(main)


def test_an_engine_without_servers_is_told_so() -> None:
    async def main() -> None:
        async with Fleet([1]) as fleet:
            (name,) = fleet.sinks
            fleet.sinks[name].outside.end()  # type: ignore[attr-defined]
            fleet.sinks[name] = FakeSink(fleet.source.tensors)
            sent, (refused,) = await fleet.sync()
            assert isinstance(sent, TransferFailed)
            for error in (sent, refused):
                assert "no server" in str(error)

    run(main)
