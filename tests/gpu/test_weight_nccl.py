"""Weight sync over NCCL, between processes that have a device each. Needs two CUDA devices."""

from __future__ import annotations

import asyncio
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest
import torch
from tests.helpers.weights import FakeSink, FakeSource, digest_of_tensors, make_tensors

from ratchet.config import WeightsConfig
from ratchet.transport.weights.registry import open_receiver, open_sender
from ratchet.types import WeightManifest, WeightRoute

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason="NCCL wants a CUDA device for each of two members"
    ),
]


class Load(msgspec.Struct):
    manifest: WeightManifest
    route: WeightRoute


def on_device(tensors: dict[str, torch.Tensor], device: int) -> dict[str, torch.Tensor]:
    return {name: tensor.to(f"cuda:{device}") for name, tensor in tensors.items()}


def run_engine(conn: Connection, config: dict[str, Any]) -> None:
    torch.cuda.set_device(1)

    async def main() -> None:
        receiver = open_receiver(WeightsConfig(**config))
        sink = FakeSink(on_device(make_tensors(0), 1))
        while (data := await asyncio.to_thread(conn.recv_bytes)) != b"exit":
            load = msgspec.msgpack.decode(data, type=Load)
            try:
                report = await receiver.receive(load.manifest, load.route, sink, "in_place")
                conn.send_bytes(report.digest.encode())
            except Exception as error:  # noqa: BLE001 - told to the test
                conn.send_bytes(repr(error).encode())
        await receiver.close()

    asyncio.run(main())


@pytest.mark.parametrize("transport", ["broadcast", "p2p"])
@pytest.mark.parametrize("bucket_mib", [0.125, 64.0])
def test_device_tensors_arrive(transport: str, bucket_mib: float) -> None:
    config = {
        "transport": transport,
        "backend": "nccl",
        "bucket_mib": bucket_mib,
        "staging_mib": 2 * bucket_mib,
        "timeout_s": 60.0,
    }
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    engine = context.Process(target=run_engine, args=(theirs, config), daemon=True)
    engine.start()

    async def main() -> None:
        torch.cuda.set_device(0)
        source = FakeSource(on_device(make_tensors(0), 0))
        sender = open_sender(WeightsConfig(**config), "127.0.0.1", source)
        digests = set()
        for version, catch_up in ((1, False), (2, False), (3, True), (4, False)):
            source.tensors = on_device(make_tensors(version), 0)
            manifest, routes = sender.plan(1, version, version, ["engine/a"], catch_up=catch_up)
            assert routes["engine/a"].backend == "nccl"
            ours.send_bytes(msgspec.msgpack.encode(Load(manifest, routes["engine/a"])))
            sent = await sender.send(manifest)
            loaded = await asyncio.to_thread(ours.recv_bytes)
            expected = digest_of_tensors(source.tensors, int(bucket_mib * 2**20))
            assert loaded.decode() == sent.digest == expected
            digests.add(expected)
        assert len(digests) == 4
        await sender.close()

    try:
        asyncio.run(main())
        ours.send_bytes(b"exit")
        engine.join(60)
        assert engine.exitcode == 0
    finally:
        engine.kill()
