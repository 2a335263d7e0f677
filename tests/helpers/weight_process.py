"""An engine and a trainer as processes of their own, told what to do over a pipe."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
from tests.helpers.weights import FakeSink, FakeSource

from ratchet.config import WeightsConfig
from ratchet.errors import RatchetError
from ratchet.transport.weights.registry import open_receiver, open_sender
from ratchet.types import WeightManifest, WeightRoute

HOST = "127.0.0.1"


class Load(msgspec.Struct, frozen=True, tag=True):
    """To an engine: join; hold for ever in the n-th write, after saying so."""

    manifest: WeightManifest
    route: WeightRoute
    hold_write: int | None = None


class Abort(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Send(msgspec.Struct, frozen=True, tag=True):
    """To a trainer: plan for these engines, say so, send; hold for ever in the n-th read, after
    saying so.
    """

    version: int
    engines: tuple[str, ...]
    hold_read: int | None = None


class Exit(msgspec.Struct, frozen=True, tag=True):
    pass


class Planned(msgspec.Struct, frozen=True, tag=True):
    manifest: WeightManifest
    routes: dict[str, WeightRoute]


class Middle(msgspec.Struct, frozen=True, tag=True):
    """The process is in the middle of a transfer."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A transfer is over at this end."""

    error: str | None
    text: str
    digest: str | None
    version: int | None
    paused: bool = False


Command = Load | Abort | Send | Exit
Event = Planned | Middle | Ended


def big_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Return 24 parameters of 2 MiB each: far more than sockets hold on the way."""
    rng = torch.Generator().manual_seed(seed)
    return {f"weight.{n}": torch.randn(512, 1024, generator=rng) for n in range(24)}


class _HoldingSink(FakeSink):
    """Holds in a write."""

    def __init__(self, conn: Connection) -> None:
        super().__init__(big_tensors(0))
        self.conn = conn
        self.hold_write: int | None = None
        self.num_writes = 0

    async def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        await super().write(tensors)
        self.num_writes += 1
        if self.num_writes == self.hold_write:
            tell(self.conn, Middle())
            await asyncio.Event().wait()


def run_engine(conn: Connection, config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    asyncio.run(_engine(conn, WeightsConfig(**config)))


def run_trainer(conn: Connection, config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    asyncio.run(_trainer(conn, WeightsConfig(**config)))


async def _engine(conn: Connection, config: WeightsConfig) -> None:
    sink, receiver = _HoldingSink(conn), open_receiver(config)

    async def load(command: Load) -> None:
        sink.hold_write, sink.num_writes = command.hold_write, 0
        error: BaseException | None = None
        digest = None
        try:
            report = await receiver.receive(command.manifest, command.route, sink, "in_place")
            digest = report.digest
        except RatchetError as caught:
            error = caught
        kind = None if error is None else type(error).__name__
        tell(conn, Ended(kind, str(error or ""), digest, sink.version, sink.paused))

    tasks: set[asyncio.Task[None]] = set()
    while not isinstance(command := await hear(conn, Command), Exit):
        if isinstance(command, Load):
            tasks.add(asyncio.create_task(load(command)))
        elif isinstance(command, Abort):
            receiver.abort(command.reason)
    await receiver.close()


async def _trainer(conn: Connection, config: WeightsConfig) -> None:
    source = FakeSource(big_tensors(0))
    sender = open_sender(config, HOST, source)
    while isinstance(command := await hear(conn, Command), Send):
        reads: list[int] = []
        hold_read = command.hold_read

        def hold(names: Sequence[str], reads: list[int] = reads) -> None:
            reads.append(1)
            if len(reads) == hold_read:  # noqa: B023 - the hook of this very round
                tell(conn, Middle())
                threading.Event().wait()

        source.tensors, source.on_read = big_tensors(command.version), hold
        manifest, routes = sender.plan(1, command.version, command.version, command.engines)
        tell(conn, Planned(manifest, dict(routes)))
        report = await sender.send(manifest)
        tell(conn, Ended(None, "", report.digest, command.version))
    await sender.close()


def tell(conn: Connection, message: Command | Event) -> None:
    conn.send_bytes(msgspec.msgpack.encode(message))


async def hear(conn: Connection, kind: Any, timeout_s: float = 60.0) -> Any:
    """Return the next message; each call has a thread of its own while it waits."""

    def receive() -> bytes:
        if not conn.poll(timeout_s):
            msg = "nothing was said in time"
            raise TimeoutError(msg)
        return conn.recv_bytes()

    return msgspec.msgpack.decode(await asyncio.to_thread(receive), type=kind)


class Child:
    """A process and the pipe to it. Forked from a server that has torch loaded already."""

    def __init__(self, target: Any, config: dict[str, Any]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.helpers.weight_process"])
        self.conn, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, config), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def tell(self, command: Command) -> None:
        tell(self.conn, command)

    async def hear(self, timeout_s: float = 60.0) -> Any:
        return await hear(self.conn, Event, timeout_s)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.conn.close()
