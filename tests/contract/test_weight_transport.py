"""Every weight transport, by name: what arrives is what was sent, or nothing is stamped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest
import torch
from tests.helpers.weights import FakeSink, FakeSource, digest_of_tensors, make_tensors

from ratchet.config import WeightsConfig
from ratchet.errors import TransferFailed, WeightsMismatch
from ratchet.transport.weights.base import LoadReport, SendReport, WeightReceiver
from ratchet.transport.weights.registry import open_receiver, open_sender

SMALL, STREAMED = 64.0, 0.125
"""MiB per bucket: the whole model in one, and in many"""
MANY = [pytest.param(1, id="one engine"), pytest.param(3, id="three engines")]


class Fleet:
    """A sender and its engines, in one process."""

    def __init__(
        self, source: FakeSource, sinks: Sequence[FakeSink], config: WeightsConfig
    ) -> None:
        self.source = source
        self.config = config
        self.sender = open_sender(config, "127.0.0.1", source)
        self.sinks = {f"rollout-{n}/a": sink for n, sink in enumerate(sinks)}
        self.receivers: dict[str, WeightReceiver] = {
            name: open_receiver(config) for name in self.sinks
        }
        self.version = 0

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for receiver in self.receivers.values():
            await receiver.close()
        await self.sender.close()

    async def sync(
        self, names: Sequence[str] | None = None
    ) -> tuple[SendReport | BaseException, dict[str, LoadReport | BaseException]]:
        names = list(self.sinks) if names is None else names
        self.version += 1
        manifest, routes = self.sender.plan(1, self.version, self.version, names)
        loads = [
            self.receivers[name].receive(manifest, routes[name], self.sinks[name], "in_place")
            for name in names
            if name in self.receivers
        ]
        async with asyncio.timeout(30):
            sent, *loaded = await asyncio.gather(
                self.sender.send(manifest), *loads, return_exceptions=True
            )
        return sent, dict(zip([n for n in names if n in self.receivers], loaded, strict=True))


@pytest.mark.parametrize("bucket_mib", [SMALL, STREAMED])
@pytest.mark.parametrize("num_engines", MANY)
def test_every_engine_holds_what_was_sent(num_engines: int, bucket_mib: float) -> None:
    config = WeightsConfig(bucket_mib=bucket_mib, timeout_s=10.0)

    async def main() -> None:
        source = FakeSource(make_tensors(1))
        sinks = [FakeSink(source.tensors) for _ in range(num_engines)]
        async with Fleet(source, sinks, config) as fleet:
            digests = []
            for seed in (1, 2, 3):
                source.tensors = make_tensors(seed)
                expected = digest_of_tensors(source.tensors, int(bucket_mib * 2**20))
                sent, loaded = await fleet.sync()
                assert isinstance(sent, SendReport), sent
                assert sent.digest == expected
                for sink, report in zip(sinks, loaded.values(), strict=True):
                    assert isinstance(report, LoadReport), report
                    assert report.digest == expected
                    assert sink.version == fleet.version
                    assert not sink.paused
                    for name, tensor in source.tensors.items():
                        assert torch.equal(sink.tensors[name], tensor), name
                digests.append(sent.digest)
            assert len(set(digests)) == 3

    asyncio.run(main())
