"""Who goes through shared memory, beside those who do not, and who does not after all."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.weights import FakeSink, FakeSource, make_tensors

from ratchet.config import WeightsConfig
from ratchet.transport.weights import shared as shared_module
from ratchet.transport.weights import shared_reader
from ratchet.transport.weights.base import LoadReport, SendReport
from ratchet.transport.weights.deadline import Deadline
from ratchet.transport.weights.registry import open_receiver, open_sender

BOTH = ("here/a", "there/a")


class Pair:
    """A trainer and two engines, one of which may be on another host as far as it says."""

    def __init__(
        self,
        *,
        transport: str = "broadcast",
        apart: bool = False,
        timeout_s: float = 10.0,
        bucket_mib: float = 0.125,
    ) -> None:
        self.config = WeightsConfig(
            transport=transport,
            timeout_s=timeout_s,
            bucket_mib=bucket_mib,
            staging_mib=2 * bucket_mib,
            verify=False,
        )
        alone = self.config.model_copy(update={"shared_memory": False})
        self.source = FakeSource(make_tensors(1))
        self.sender = open_sender(self.config, "127.0.0.1", self.source)
        self.sinks = {name: FakeSink(self.source.tensors) for name in BOTH}
        self.receivers = {
            "here/a": open_receiver(self.config),
            "there/a": open_receiver(alone if apart else self.config),
        }
        self.version = 0

    async def __aenter__(self) -> Pair:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for receiver in self.receivers.values():
            await receiver.close()
        await self.sender.close()

    async def sync(self, *names: str, catch_up: bool = False) -> SendReport:
        """Publish the next version; every engine must hold it."""
        self.version += not catch_up
        self.source.tensors = make_tensors(self.version)
        manifest, routes = self.sender.plan(1, self.version, self.version, names, catch_up=catch_up)
        loads = [
            self.receivers[name].receive(manifest, routes[name], self.sinks[name], "in_place")
            for name in names
        ]
        sent, *loaded = await asyncio.gather(
            self.sender.send(manifest), *loads, return_exceptions=True
        )
        assert isinstance(sent, SendReport), sent
        for name, report in zip(names, loaded, strict=True):
            if name not in sent.lost:
                assert isinstance(report, LoadReport), report
                for key, tensor in self.source.tensors.items():
                    assert torch.equal(self.sinks[name].tensors[key], tensor)
        return sent


def run(main: Callable[[], Any]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await main()

    asyncio.run(limited())


def test_neighbours_share_from_their_second_version_on() -> None:
    async def main() -> None:
        async with Pair() as pair:
            shared = [tuple((await pair.sync(*BOTH)).shared) for _ in range(3)]
            assert shared == [(), BOTH, BOTH]

    run(main)


@pytest.mark.parametrize("transport", ["broadcast", "p2p"])
def test_others_go_their_way_beside_them(transport: str) -> None:
    async def main() -> None:
        async with Pair(transport=transport, apart=True) as pair:
            for number in range(4):
                sent = await pair.sync(*BOTH)
                assert tuple(sent.shared) == (("here/a",) if number else ())
                assert sent.lost == {}
            assert tuple((await pair.sync("there/a")).shared) == ()
            await pair.sync(*BOTH)
            await pair.sync("here/a", catch_up=True)
            await pair.sync(*BOTH)

    run(main)


def test_without_the_memory_they_go_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*sizes: int) -> None:
        raise OSError(12, "there is no memory")

    async def main() -> None:
        async with Pair() as pair:
            assert (await pair.sync(*BOTH)).not_shared == ""
            with monkeypatch.context() as patch:
                patch.setattr(shared_module, "OwnSegment", full)
                sent = await pair.sync(*BOTH)
            assert sent.shared == ()
            assert "there is no memory" in sent.not_shared
            sent = await pair.sync(*BOTH)
            assert (tuple(sent.shared), sent.not_shared) == (BOTH, "")

    run(main)


def test_a_neighbour_that_was_lost_goes_with_the_others_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    knock, number = shared_reader.knock, itertools.count()

    def knock_in_vain(*args: Any) -> Any:
        if next(number) == 0:
            raise ConnectionRefusedError(111, "no door here")
        return knock(*args)

    async def main() -> None:
        async with Pair(timeout_s=2.0) as pair:
            await pair.sync(*BOTH)
            monkeypatch.setattr(shared_reader, "knock", knock_in_vain)
            ((lost, reason),) = (await pair.sync(*BOTH)).lost.items()
            assert "took no bucket for 0.5 s" in reason
            sent = await pair.sync(*BOTH)
            assert list(sent.shared) == [name for name in BOTH if name != lost]
            assert tuple((await pair.sync(*BOTH)).shared) == BOTH

    run(main)


def test_a_slow_engine_reads_what_it_was_sent_while_the_next_version_travels() -> None:
    async def main() -> None:
        async with Pair(bucket_mib=64.0) as pair:  # all of it is in the memory at once
            await pair.sync(*BOTH)
            sink = pair.sinks["here/a"]
            sink.hold["write"] = asyncio.Event()
            pair.version, sent = 2, make_tensors(2)
            pair.source.tensors = sent
            manifest, routes = pair.sender.plan(1, 2, 2, BOTH)
            slow, quick = (
                asyncio.create_task(
                    pair.receivers[name].receive(
                        manifest, routes[name], pair.sinks[name], "in_place"
                    )
                )
                for name in BOTH
            )
            report = await pair.sender.send(manifest)
            await quick
            assert report.shared == BOTH
            await pair.sync("there/a")
            sink.hold["write"].set()
            await slow
            assert sink.version == 2
            assert all(torch.equal(sink.tensors[name], value) for name, value in sent.items())

    run(main)


def test_nothing_stays_open() -> None:
    async def main() -> None:
        async with Pair(apart=True) as pair:
            for _ in range(3):
                await pair.sync(*BOTH)

    run(main)  # once, for what is opened once in a process
    before = open_files()
    for _ in range(3):
        run(main)
    deadline = Deadline(10.0)
    while open_files() > before:  # threads close what is theirs as they end
        assert deadline.left_s
        threading.Event().wait(0.01)


def open_files() -> int:
    found = 0
    for fd in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):  # that of the directory itself
            found += fd.readlink().name.startswith(("memfd:", "socket:"))
    return found
