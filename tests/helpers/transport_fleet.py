"""A weight sender and its engines in one process, over any transport, and ways to break them.

A test of every transport has `pytestmark = every_transport` and an argument `transport`.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from tests.helpers.weights import FakeSink, FakeSource, digest_of_tensors, make_tensors

from ratchet.config import WeightsConfig
from ratchet.transport.weights.base import LoadReport, SendReport, WeightReceiver
from ratchet.transport.weights.finalize import Arrived
from ratchet.transport.weights.inbox import Inbox
from ratchet.transport.weights.registry import open_receiver, open_sender
from ratchet.types import WeightManifest, WeightRoute

Loads = dict[str, asyncio.Task[LoadReport]]

WHOLE, STREAMED = 64.0, 0.125
"""MiB per bucket: the model fits in one, or is many times what an engine's end may hold"""
LAST = 6
"""The last bucket of the model when it is streamed; after it only the trailer is lacking."""
every_transport = [
    pytest.mark.parametrize("transport", ["broadcast", "p2p", "shared"]),
    pytest.mark.usefixtures("layers_are_large"),
]
both_sizes = pytest.mark.parametrize(
    "bucket_mib", [pytest.param(WHOLE, id="whole"), pytest.param(STREAMED, id="streamed")]
)
one_and_three = pytest.mark.parametrize("num_engines", [1, 3])


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
