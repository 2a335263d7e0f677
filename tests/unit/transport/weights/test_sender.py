"""What the contract suite cannot see: when a group is kept, and what is left behind."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import weakref
from collections.abc import Iterator
from time import monotonic
from typing import Any

import msgspec
import pytest
import torch
from tests.helpers.weights import FakeSink, FakeSource, make_tensors

from ratchet.config import WeightsConfig
from ratchet.errors import TransferFailed
from ratchet.transport.weights import link as link_module
from ratchet.transport.weights.groups import (
    GlooGroup,
)
from ratchet.transport.weights.registry import open_receiver, open_sender

HOST = "127.0.0.1"
CPU = torch.device("cpu")


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the groups that rank 0 built, and that all of them are gone in the end."""
    names: list[str] = []
    alive: list[weakref.ref[Any]] = []

    class Counted(GlooGroup):
        def __init__(self, store: Any, name: str, rank: int, size: int, **rest: Any) -> None:
            super().__init__(store, name, rank, size, **rest)
            alive.append(weakref.ref(self._group))
            if rank == 0:
                names.append(name)

    monkeypatch.setattr(link_module, "GlooGroup", Counted)
    yield names
    gc.collect()
    deadline = monotonic() + 10
    while any(ref() is not None for ref in alive):
        assert monotonic() < deadline, "a process group outlives its link"
        threading.Event().wait(0.01)


class Pair:
    def __init__(self, num_engines: int = 2) -> None:
        config = WeightsConfig(timeout_s=10.0, shared_memory=False)
        self.source = FakeSource(make_tensors(1))
        self.sender = open_sender(config, HOST, self.source)
        self.engines = {
            f"e{n}/a": (open_receiver(config), FakeSink(self.source.tensors))
            for n in range(num_engines)
        }
        self.version = 0

    async def __aenter__(self) -> Pair:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for receiver, _ in self.engines.values():
            await receiver.close()
        await self.sender.close()

    async def sync(self, *names: str) -> list[Any]:
        self.version += 1
        manifest, routes = self.sender.plan(1, self.version, self.version, names)
        loads = [
            self.engines[n][0].receive(manifest, routes[n], self.engines[n][1], "in_place")
            for n in names
        ]
        return await asyncio.gather(self.sender.send(manifest), *loads, return_exceptions=True)


def run(main: Any) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await main()

    asyncio.run(limited())


def test_the_group_is_kept_while_the_membership_is_the_same(entered: list[str]) -> None:
    async def main() -> None:
        async with Pair() as pair:
            for _ in range(4):
                await pair.sync("e0/a", "e1/a")
            assert len(entered) == 1
            await pair.sync("e1/a", "e0/a")
            assert len(entered) == 2
            await pair.sync("e1/a")
            await pair.sync("e1/a", "e0/a")
            assert len(entered) == 4
            assert len(set(entered)) == 4

    run(main)


def test_an_engine_that_fails_by_itself_keeps_the_group(entered: list[str]) -> None:
    async def main() -> None:
        async with Pair() as pair:
            sink = pair.engines["e1/a"][1]
            sink.fail_in = "write"
            sent, well, ill = await pair.sync("e0/a", "e1/a")
            assert not isinstance(sent, BaseException)
            assert not isinstance(well, BaseException)
            assert isinstance(ill, RuntimeError)
            sink.fail_in = None
            await pair.sync("e0/a", "e1/a")
            assert len(entered) == 1

    run(main)


def test_a_failure_gives_the_group_up(entered: list[str]) -> None:
    async def main() -> None:
        async with Pair() as pair:
            await pair.sync("e0/a", "e1/a")

            def fail(names: Any) -> None:
                msg = "out of memory"
                raise RuntimeError(msg)

            pair.source.on_read = fail
            sent, *loads = await pair.sync("e0/a", "e1/a")
            assert str(sent) == "out of memory"
            assert all(isinstance(load, TransferFailed) for load in loads)
            pair.source.on_read = lambda names: None
            sent, *_ = await pair.sync("e0/a", "e1/a")
            assert not isinstance(sent, BaseException)
            assert len(entered) == 2

    run(main)


def test_threads_end_with_their_links(entered: list[str]) -> None:
    others = set(threading.enumerate())  # what an engine of an earlier test has not ended yet

    def ours() -> list[threading.Thread]:
        here = [t for t in threading.enumerate() if t not in others]
        return [t for t in here if t.name.startswith("ratchet-weights")]

    async def main() -> None:
        async with Pair() as pair:
            await pair.sync("e0/a", "e1/a")
            assert len(ours()) == 4, "one for each end, and one that gathers"
        for thread in ours():
            await asyncio.to_thread(thread.join, 5)
        assert ours() == []

    run(main)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_transfer_over_any_loopback_address(host: str) -> None:
    async def main() -> None:
        async with Pair() as pair:
            await pair.sender.close()
            pair.sender = open_sender(
                WeightsConfig(timeout_s=10.0, shared_memory=False), host, pair.source
            )
            sent, *loads = await pair.sync("e0/a", "e1/a")
            assert not isinstance(sent, BaseException), sent
            assert not any(isinstance(load, BaseException) for load in loads)

    run(main)


def test_a_trainer_that_stands_still_does_not_hold_an_engine_that_connects() -> None:
    """The handshake of torch's store has no timeout: its thread is left behind."""

    async def main() -> None:
        async with Pair() as pair:
            manifest, routes = pair.sender.plan(1, 1, 1, ["e0/a"])
            with socket.socket() as mute:
                mute.bind((HOST, 0))
                mute.listen(8)
                route = msgspec.structs.replace(
                    routes["e0/a"], port=mute.getsockname()[1], timeout_s=0.1
                )
                receiver, sink = pair.engines["e0/a"]
                with pytest.raises(TransferFailed, match=r"version 1 was not loaded within 0\.1 s"):
                    await receiver.receive(manifest, route, sink, "in_place")
                assert sink.events == []
                sent, _ = await pair.sync("e0/a")
                assert not isinstance(sent, BaseException)

    run(main)
