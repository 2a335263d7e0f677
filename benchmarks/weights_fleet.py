"""A trainer and its engine processes, for the benchmark of weight sync."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

import msgspec
import torch
from torch import distributed as dist

from ratchet.config import WeightsConfig
from ratchet.transport.weights.base import LoadReport, TensorSpec, WeightReceiver, WeightSender
from ratchet.transport.weights.buckets import dtype_name
from ratchet.transport.weights.registry import open_receiver
from ratchet.types import PauseMode, WeightManifest, WeightRoute
from weights_floors import Buffers, Floor, bare_group, bare_loop, copy_model

HOST = "127.0.0.1"


def even_model() -> dict[str, torch.Tensor]:
    """512 MiB of float32 in tensors of 1 MiB."""
    return {f"layers.{n}.weight": torch.full((512, 512), float(n)) for n in range(512)}


def qwen3_model() -> dict[str, torch.Tensor]:
    """500 MB of bfloat16 in the shapes of Qwen3-0.6B, six layers of it: an embedding of 297 MiB,
    matrices of 2 to 6 MiB and vectors.
    """
    shapes = {"q": (2048, 1024), "k": (1024, 1024), "v": (1024, 1024), "o": (1024, 2048)}
    shapes |= {"gate": (3072, 1024), "up": (3072, 1024), "down": (1024, 3072)}
    shapes |= {"norm1": (1024,), "norm2": (1024,), "q_norm": (128,), "k_norm": (128,)}
    tensors = {"embed": torch.zeros(151_936, 1024, dtype=torch.bfloat16)}
    for n in range(6):
        tensors |= {
            f"{n}.{name}": torch.full(shape, float(n), dtype=torch.bfloat16)
            for name, shape in shapes.items()
        }
    return tensors


def small_model() -> dict[str, torch.Tensor]:
    """About 100,000 parameters in 24 tensors: a two-layer Qwen3 of hidden size 64."""
    tensors = {"embed.weight": torch.randn(17, 64), "norm.weight": torch.randn(64)}
    for n in range(2):
        shapes = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64)}
        shapes |= {"gate": (192, 64), "up": (192, 64), "down": (64, 192)}
        tensors |= {f"{n}.{name}": torch.randn(shape) for name, shape in shapes.items()}
        tensors |= {f"{n}.norm{k}": torch.randn(64) for k in range(4)}
    return tensors


MODELS = {"even": even_model, "qwen3": qwen3_model, "small": small_model}


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
    """An engine that does nothing but take weights: it adopts them, or copies them, on a thread as
    a real one would.
    """

    version: int | None = None
    device: torch.device | None = None
    """where it can adopt weights"""

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

    @property
    def adopts(self) -> torch.device | None:
        return self.device

    async def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self.model.tensors[name].data = tensor

    async def read(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        return self.model.read(names)

    async def stamp(self, version: int) -> None:
        self.version = version

    async def resume(self) -> None:
        pass


class Sync(msgspec.Struct, tag=True):
    manifest: WeightManifest
    route: WeightRoute
    config: str
    """JSON"""
    adopt: bool


class Join(msgspec.Struct, tag=True):
    port: int
    rank: int
    size: int


class Done(msgspec.Struct, tag=True):
    waited_s: float = 0.0
    paused_s: float = 0.0
    extra_mib: float = 0.0
    cpu_s: float = 0.0


class Peak:
    """The most resident memory since it was made, above what it was then."""

    def __init__(self) -> None:
        self._before = self._read("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")

    @property
    def extra_mib(self) -> float:
        return self._read("VmHWM") - self._before

    def _read(self, name: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith(name))) / 1024


def engine_process(conn: Connection, model: str) -> None:
    torch.set_num_threads(1)
    asyncio.run(EngineProcess(conn, Engine(MODELS[model]())).serve())


class EngineProcess:
    def __init__(self, conn: Connection, engine: Engine) -> None:
        self.conn = conn
        self.engine = engine
        self.receivers: dict[str, WeightReceiver] = {}
        self.group: Any = None
        self.buffers = Buffers()

    async def serve(self) -> None:
        while (data := await asyncio.to_thread(self.conn.recv_bytes)) != b"exit":
            command = msgspec.msgpack.decode(data, type=Sync | Floor | Join)
            done, begin = Done(), process_time()
            if isinstance(command, Join):
                store = dist.TCPStore(HOST, command.port, is_master=False, wait_for_workers=False)
                self.group = bare_group(store, command.rank, command.size)
            elif isinstance(command, Floor):
                self.floor(command)
            else:
                peak = Peak()
                report = await self.receive(command)
                done = Done(report.move_s, report.paused_s, peak.extra_mib)
            done.cpu_s = process_time() - begin
            self.conn.send_bytes(msgspec.msgpack.encode(done))
        for receiver in self.receivers.values():
            await receiver.close()

    def floor(self, command: Floor) -> None:
        buffers = self.buffers.of(max(command.sizes))
        if command.kind == "memcpy":
            copy_model(self.engine.model.tensors, buffers[0])
        else:
            bare_loop(self.group, command, buffers)

    async def receive(self, command: Sync) -> LoadReport:
        if command.config not in self.receivers:
            config = WeightsConfig.model_validate_json(command.config)
            self.receivers[command.config] = open_receiver(config)
        self.engine.device = torch.device("cpu") if command.adopt else None
        return await self.receivers[command.config].receive(
            command.manifest, command.route, self.engine, "in_place"
        )


class Result(NamedTuple):
    wall_s: float
    waited_s: float
    paused_s: float
    cpu_s: float
    trainer_mib: float
    engine_mib: float
    sizes: tuple[int, ...]


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
        self.store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        size = num_receivers + 1
        for rank, conn in enumerate(self.conns, 1):
            conn.send_bytes(msgspec.msgpack.encode(Join(self.store.port, rank, size)))
        self.group = bare_group(self.store, 0, size)
        self.collect()
        self.buffers = Buffers()
        self.version = 0

    def collect(self) -> list[Done]:
        return [msgspec.msgpack.decode(conn.recv_bytes(), type=Done) for conn in self.conns]

    def floor(self, kind: str, sizes: Sequence[int], *, digests: bool = False) -> Result:
        """Move the same bytes, and nothing else, or compute their digests as well."""
        floor = Floor(kind, tuple(sizes), digests)
        buffers = self.buffers.of(max(sizes))
        peak, start, cpu = Peak(), perf_counter(), process_time()
        for conn in self.conns:
            conn.send_bytes(msgspec.msgpack.encode(floor))
        if kind != "memcpy":
            bare_loop(self.group, floor, buffers)
        return self.result(self.collect(), peak, start, cpu, floor.sizes)

    async def sync(
        self, sender: WeightSender, config: WeightsConfig, *, adopt: bool = True
    ) -> Result:
        """Publish the next version."""
        self.version += 1
        self.source.tensors[next(iter(self.source.tensors))].fill_(self.version)
        text = config.model_dump_json()
        names = [f"engine-{rank}/{len(text)}" for rank in range(len(self.conns))]
        peak, start, cpu = Peak(), perf_counter(), process_time()
        manifest, routes = sender.plan(1, self.version, self.version, names)
        for name, conn in zip(names, self.conns, strict=True):
            conn.send_bytes(msgspec.msgpack.encode(Sync(manifest, routes[name], text, adopt)))
        await sender.send(manifest)
        done = await asyncio.to_thread(self.collect)
        return self.result(done, peak, start, cpu, manifest.bucket_bytes)

    def result(
        self, done: Sequence[Done], peak: Peak, start: float, cpu: float, sizes: tuple[int, ...]
    ) -> Result:
        return Result(
            perf_counter() - start,
            max(each.waited_s for each in done),
            max(each.paused_s for each in done),
            process_time() - cpu + sum(each.cpu_s for each in done),
            peak.extra_mib,
            max(each.extra_mib for each in done),
            sizes,
        )

    def close(self) -> None:
        """End the processes."""
        for conn, process in zip(self.conns, self.processes, strict=True):
            conn.send_bytes(b"exit")
            process.join()
