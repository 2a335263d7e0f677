"""How fast a version moves from the trainer to its engines, against a bare loop of broadcasts.

Run: python benchmarks/weights.py [--rounds 3] [--receivers 1 3] [--buckets 4 16 64 256]

Every engine is a process. The bare loop moves the same bytes in the same buckets over gloo and does
nothing else: no gathering, no digests, no engine. Rounds of the bare loop, of a sync with read-back
verification and of one without alternate in one run, so that whatever else the machine does meets
all of them alike. The clock is the trainer's: from the plan until every engine says that it is
loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
from collections.abc import Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import msgspec
import torch
from torch import distributed as dist

from ratchet.config import WeightsConfig
from ratchet.transport.weights.base import LoadReport, TensorSpec, WeightReceiver
from ratchet.transport.weights.buckets import dtype_name
from ratchet.transport.weights.groups import serve_store
from ratchet.transport.weights.registry import open_receiver, open_sender
from ratchet.types import PauseMode, WeightManifest, WeightRoute

HOST = "127.0.0.1"


def big_model() -> dict[str, torch.Tensor]:
    """512 MiB of float32 in tensors of 1 MiB."""
    return {f"layers.{n}.weight": torch.full((512, 512), float(n)) for n in range(512)}


def small_model() -> dict[str, torch.Tensor]:
    """About 100,000 parameters in 24 tensors: a two-layer Qwen3 of hidden size 64."""
    tensors = {"embed.weight": torch.randn(17, 64), "norm.weight": torch.randn(64)}
    for n in range(2):
        shapes = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64)}
        shapes |= {"gate": (192, 64), "up": (192, 64), "down": (64, 192)}
        tensors |= {f"{n}.{name}": torch.randn(shape) for name, shape in shapes.items()}
        tensors |= {f"{n}.norm{k}": torch.randn(64) for k in range(4)}
    return tensors


MODELS = {"big": big_model, "small": small_model}


class Model:
    """Both a trainer's parameters and an engine's, in memory."""

    version: int | None = None

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def specs(self) -> Sequence[TensorSpec]:
        return [TensorSpec(k, dtype_name(t), tuple(t.shape)) for k, t in self.tensors.items()]

    def read(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        return [self.tensors[name] for name in names]


class Engine:
    """An engine that does nothing but copy, on a thread as a real one would."""

    version: int | None = None

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.model = Model(tensors)

    def specs(self) -> Sequence[TensorSpec]:
        return self.model.specs()

    async def pause(self, mode: PauseMode) -> None:
        pass

    async def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        def copy() -> None:
            for name, tensor in tensors.items():
                self.model.tensors[name].copy_(tensor)

        await asyncio.to_thread(copy)

    async def read(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        return self.model.read(names)

    async def stamp(self, version: int) -> None:
        self.version = version

    async def resume(self) -> None:
        pass


class Sync(msgspec.Struct, tag=True):
    manifest: WeightManifest
    route: WeightRoute
    verify: bool


class Bare(msgspec.Struct, tag=True):
    sizes: tuple[int, ...]


class Join(msgspec.Struct, tag=True):
    port: int
    rank: int
    size: int


class Done(msgspec.Struct, tag=True):
    wall_s: float
    paused_s: float = 0.0


def engine_process(conn: Connection, model: str) -> None:
    torch.set_num_threads(1)
    engine = Engine(MODELS[model]())
    asyncio.run(serve(conn, engine))


async def serve(conn: Connection, engine: Engine) -> None:
    receivers: dict[bool, WeightReceiver] = {}
    group: Any = None
    buffer = torch.zeros(0, dtype=torch.uint8)
    while (data := await asyncio.to_thread(conn.recv_bytes)) != b"exit":
        command = msgspec.msgpack.decode(data, type=Sync | Bare | Join)
        start = perf_counter()
        paused_s = 0.0
        if isinstance(command, Join):
            store = dist.TCPStore(HOST, command.port, is_master=False, wait_for_workers=False)
            group = bare_group(store, command.rank, command.size)
        elif isinstance(command, Bare):
            if len(buffer) < max(command.sizes):
                buffer = torch.zeros(max(command.sizes), dtype=torch.uint8)
            bare_loop(group, buffer, command.sizes)
        else:
            if command.verify not in receivers:
                config = WeightsConfig(timeout_s=300.0, verify=command.verify)
                receivers[command.verify] = open_receiver(config)
            report: LoadReport = await receivers[command.verify].receive(
                command.manifest, command.route, engine, "in_place"
            )
            paused_s = report.paused_s
        conn.send_bytes(msgspec.msgpack.encode(Done(perf_counter() - start, paused_s)))
    for receiver in receivers.values():
        await receiver.close()


def bare_group(store: Any, rank: int, size: int) -> Any:
    return dist.ProcessGroupGloo(dist.PrefixStore("bare", store), rank, size, timedelta(minutes=5))


def bare_loop(group: Any, buffer: torch.Tensor, sizes: Sequence[int]) -> None:
    for size in sizes:
        group.broadcast([buffer[:size]], dist.BroadcastOptions()).wait()


class Fleet:
    """The trainer and its engine processes."""

    def __init__(self, model: str, num_receivers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.source = Model(MODELS[model]())
        self.conns: list[Connection] = []
        self.processes = []
        for _ in range(num_receivers):
            ours, theirs = context.Pipe()
            process = context.Process(target=engine_process, args=(theirs, model), daemon=True)
            process.start()
            self.conns.append(ours)
            self.processes.append(process)
        self.store, _, port = serve_store(HOST)
        size = num_receivers + 1
        for rank, conn in enumerate(self.conns, 1):
            conn.send_bytes(msgspec.msgpack.encode(Join(port, rank, size)))
        self.group = bare_group(self.store, 0, size)
        self.collect()
        self.version = 0

    def collect(self) -> list[Done]:
        return [msgspec.msgpack.decode(conn.recv_bytes(), type=Done) for conn in self.conns]

    def bare(self, sizes: Sequence[int]) -> float:
        buffer = torch.zeros(max(sizes), dtype=torch.uint8)
        start = perf_counter()
        for conn in self.conns:
            conn.send_bytes(msgspec.msgpack.encode(Bare(tuple(sizes))))
        bare_loop(self.group, buffer, sizes)
        self.collect()
        return perf_counter() - start

    async def sync(self, sender: Any, *, verify: bool) -> tuple[float, float, WeightManifest]:
        """Return the wall time, the longest pause of an engine, and the plan."""
        self.version += 1
        self.source.tensors[next(iter(self.source.tensors))].fill_(self.version)
        names = [f"engine-{rank}/{verify}" for rank in range(len(self.conns))]
        start = perf_counter()
        manifest, routes = sender.plan(1, self.version, self.version, names)
        for name, conn in zip(names, self.conns, strict=True):
            conn.send_bytes(msgspec.msgpack.encode(Sync(manifest, routes[name], verify)))
        await sender.send(manifest)
        done = await asyncio.to_thread(self.collect)
        return perf_counter() - start, max(each.paused_s for each in done), manifest

    def close(self) -> None:
        for conn, process in zip(self.conns, self.processes, strict=True):
            conn.send_bytes(b"exit")
            process.join()


async def throughput(num_receivers: int, buckets: Sequence[float], rounds: int) -> None:
    fleet = Fleet("big", num_receivers)
    for bucket_mib in buckets:
        config = WeightsConfig(bucket_mib=bucket_mib, timeout_s=300.0)
        senders = {verify: open_sender(config, HOST, fleet.source) for verify in (True, False)}
        walls: dict[str, list[float]] = {"bare": [], "verified": [], "unverified": []}
        pauses: dict[str, list[float]] = {"verified": [], "unverified": []}
        for number in range(rounds + 1):  # the first one warms everything up
            for verify, kind in ((True, "verified"), (False, "unverified")):
                wall, paused, manifest = await fleet.sync(senders[verify], verify=verify)
                bare = fleet.bare(manifest.bucket_bytes)
                if number:
                    walls["bare"].append(bare)
                    walls[kind].append(wall)
                    pauses[kind].append(paused / wall)
        gigabytes = sum(manifest.bucket_bytes) / 1e9
        speed = {kind: gigabytes / statistics.median(wall) for kind, wall in walls.items()}
        shares = " ".join(
            f"{kind} {speed[kind]:.2f} ({speed[kind] / speed['bare']:.0%} of bare,"
            f" paused {statistics.median(pauses[kind]):.0%} of it)"
            for kind in pauses
        )
        print(
            f"{num_receivers} receivers, {bucket_mib:g} MiB x {len(manifest.bucket_bytes)}:"
            f" GB/s to each: bare {speed['bare']:.2f} {shares}",
            flush=True,
        )
        for sender in senders.values():
            await sender.close()
    fleet.close()


async def latency(num_receivers: int, rounds: int) -> None:
    fleet = Fleet("small", num_receivers)
    parameters = sum(tensor.numel() for tensor in fleet.source.tensors.values())
    sender = open_sender(WeightsConfig(), HOST, fleet.source)
    walls, pauses, bares = [], [], []
    for number in range(rounds + 5):
        wall, paused, manifest = await fleet.sync(sender, verify=True)
        bare = fleet.bare(manifest.bucket_bytes)
        if number >= 5:
            walls.append(wall * 1e3)
            pauses.append(paused * 1e3)
            bares.append(bare * 1e3)
    print(
        f"{num_receivers} receivers, {parameters} parameters, {rounds} syncs: median"
        f" {statistics.median(walls):.1f} ms (p90 {sorted(walls)[int(rounds * 0.9)]:.1f}), paused"
        f" {statistics.median(pauses):.1f} ms, bare loop {statistics.median(bares):.1f} ms",
        flush=True,
    )
    await sender.close()
    fleet.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--buckets", type=float, nargs="*", default=[4, 16, 64, 256])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for num_receivers in arguments.receivers:
        asyncio.run(latency(num_receivers, 50))
        if arguments.buckets:
            asyncio.run(throughput(num_receivers, arguments.buckets, arguments.rounds))


if __name__ == "__main__":
    main()
