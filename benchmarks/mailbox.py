"""The mailbox transport against a bare asyncio Protocol with msgspec: two processes, a Unix socket.

    python benchmarks/mailbox.py [--rounds 7] [--scale 1.0]

Ours has everything on: authenticated session, numbers, acks, resend buffers, lanes, traces. The
bare one has a length and msgpack of the same messages and nothing else. Rounds are interleaved in
one run, because the machine's load moves more than the difference does; trust medians and ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import psutil

from ratchet.messages import (
    ClaimPrompts,
    DescribeLineage,
    GroupFinished,
    LineageDescribed,
    Message,
    WireMessage,
)
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.node import Node
from ratchet.types import Packed, Rollout, RolloutGroup, RolloutStats, VersionSpan

KEY = bytes(range(32))
SMALL = ClaimPrompts("rollout-0", "incarnation-0", 128)


def make_group() -> GroupFinished:
    """8 rollouts of 512 completion tokens with logprobs: what a rollout worker sends."""
    rng = np.random.default_rng(0)
    rollouts = tuple(
        Rollout(
            prompt_ids=Packed.of(rng.integers(0, 150_000, 128), "int32"),
            completion_ids=Packed.of(rng.integers(0, 150_000, 1024), "int32"),
            behavior_logprobs=Packed.of(rng.normal(size=1024), "float32"),
            loss_mask=Packed.of(np.zeros(0), "uint8"),
            spans=(VersionSpan(1, 0, 1024),),
            finish_reason="stop",
            reward=1.0,
            seed=i,
        )
        for i in range(8)
    )
    group = RolloutGroup(1, 0, "prompt-1", 0, rollouts)
    return GroupFinished("rollout-0", "incarnation-0", group, RolloutStats("rollout-0", "i"))


class Counter:
    """The receiver: counts tells; answers an ask for n, n > 0, once it has been told n in all."""

    name = "receiver"

    def __init__(self) -> None:
        self._count = 0
        self._waiting: deque[tuple[int, asyncio.Future[Message]]] = deque()

    def tell(self, message: Message) -> None:
        self._count += 1
        if self._waiting:
            self._settle()

    def ask(
        self, message: Any, *, block: bool = False, timeout: float = 0.0
    ) -> asyncio.Future[Message]:
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting.append((message.versions[0], future))
        self._settle()
        return future

    def watch(self, watcher: Any) -> None:
        raise NotImplementedError

    def _settle(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._count:
            self._waiting.popleft()[1].set_result(LineageDescribed(()))


class Client(Protocol):
    def tell(self, message: Message) -> None: ...
    def ask(self, message: DescribeLineage) -> Awaitable[Any]: ...


# --- ours


class Log:
    def debug(self, event: str, **fields: Any) -> None: ...
    def info(self, event: str, **fields: Any) -> None: ...

    def warning(self, event: str, **fields: Any) -> None:
        print(event, fields, file=sys.stderr)

    error = warning


class DeadLetters:
    def record(self, *, sender: str | None, receiver: str, message: Any, reason: str) -> None:
        raise AssertionError(reason)


def make_node(directory: Path, name: str, local: Callable[[str], Any]) -> Node:
    return Node(
        name=name,
        incarnation=uuid.uuid4().hex,
        address=Address.parse(f"unix:{directory}/{name}"),
        key=KEY,
        run_id="benchmark",
        local=local,
        locate=lambda wanted: Address.parse(f"unix:{directory}/{wanted}"),
        dead_letters=DeadLetters(),
        new_id=lambda: uuid.uuid4().hex,
        random_bytes=os.urandom,
        log=Log(),
    )


class Ours:
    def __init__(self, node: Node) -> None:
        self._ref = node.ref("receiver")

    def tell(self, message: Message) -> None:
        self._ref.tell(message)

    def ask(self, message: DescribeLineage) -> Awaitable[Any]:
        return self._ref.ask(message, block=False, timeout=60.0)


# --- bare


class BareTell(msgspec.Struct, tag="t", array_like=True):
    body: WireMessage


class BareAsk(msgspec.Struct, tag="q", array_like=True):
    ask_id: int
    body: WireMessage


class BareAnswer(msgspec.Struct, tag="a", array_like=True):
    ask_id: int
    body: WireMessage


class Bare(asyncio.BufferedProtocol):
    """Both ends: frames in, frames out, nothing else."""

    def __init__(self, receiver: Counter | None) -> None:
        self._receiver = receiver
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(BareTell | BareAsk | BareAnswer)
        self._buffer = bytearray(256 << 10)
        self._start = self._end = 0
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._ids = itertools.count()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._buffer):
            held = self._buffer[self._start : self._end]
            self._buffer[: len(held)] = held
            self._start, self._end = 0, len(held)
        return memoryview(self._buffer)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        while self._end - self._start >= 4:
            size = int.from_bytes(self._buffer[self._start : self._start + 4], "big")
            if self._end - self._start - 4 < size:
                return
            begin = self._start + 4
            self._start = begin + size
            self._handle(self._decoder.decode(memoryview(self._buffer)[begin : begin + size]))

    def _handle(self, frame: Any) -> None:
        if type(frame) is BareTell:
            self._receiver.tell(frame.body)
        elif type(frame) is BareAsk:
            future = self._receiver.ask(frame.body)
            future.add_done_callback(
                lambda done: self._write(BareAnswer(frame.ask_id, done.result()))
            )
        else:
            self._asked.pop(frame.ask_id).set_result(frame.body)

    def _write(self, frame: Any) -> None:
        data = self._encoder.encode(frame)
        self._transport.write(len(data).to_bytes(4, "big") + data)

    def tell(self, message: Message) -> None:
        self._write(BareTell(message))

    def ask(self, message: DescribeLineage) -> Awaitable[Any]:
        ask_id = next(self._ids)
        future = self._asked[ask_id] = asyncio.get_running_loop().create_future()
        self._write(BareAsk(ask_id, message))
        return future


# --- the measurement


async def serve(directory: Path) -> None:
    receiver = Counter()
    node = make_node(directory, "receiver", lambda name: receiver)
    await node.start()
    loop = asyncio.get_running_loop()
    await loop.create_unix_server(lambda: Bare(Counter()), str(directory / "bare"))
    print("ready", flush=True)
    await asyncio.Event().wait()


class Cpu:
    """Seconds of CPU that both processes have used."""

    def __init__(self, server_pid: int) -> None:
        self._processes = (psutil.Process(), psutil.Process(server_pid))

    def __call__(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)


class Driver:
    """Sends bursts, two ahead of what the receiver has confirmed: a bounded number in flight, as
    credits and leases bound it in the real system.
    """

    def __init__(self, client: Client, cpu: Cpu) -> None:
        self._client = client
        self._cpu = cpu
        self._told = 0

    async def rate(self, message: Message, count: int, burst: int) -> tuple[float, float]:
        """Messages per second, and microseconds of CPU per message, both ends together."""
        cpu_begin, begin = self._cpu(), time.perf_counter()
        confirmed: deque[Awaitable[Any]] = deque()
        for _ in range(count // burst):
            for _ in range(burst):
                self._client.tell(message)
            self._told += burst
            confirmed.append(self._client.ask(DescribeLineage((self._told,))))
            if len(confirmed) > 2:
                await confirmed.popleft()
        for each in confirmed:
            await each
        num_told = count // burst * burst
        spent = time.perf_counter() - begin
        return num_told / spent, (self._cpu() - cpu_begin) / num_told * 1e6

    async def ask_p50(self, count: int) -> float:
        """Median microseconds of an ask."""
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            await self._client.ask(DescribeLineage((0,)))
            times.append(time.perf_counter() - begin)
        return statistics.median(times) * 1e6


async def measure(directory: Path, server_pid: int, rounds: int, scale: float) -> None:
    node = make_node(directory, "sender", lambda name: None)
    await node.start()
    loop = asyncio.get_running_loop()
    _, bare = await loop.create_unix_connection(lambda: Bare(None), str(directory / "bare"))
    cpu = Cpu(server_pid)
    drivers = {"ours": Driver(Ours(node), cpu), "bare": Driver(bare, cpu)}
    group = make_group()
    kilobytes = len(msgspec.msgpack.encode(group)) // 1000
    table: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for name, driver in drivers.items():
            tells, tell_cpu = await driver.rate(SMALL, int(50_000 * scale), 256)
            groups, group_cpu = await driver.rate(group, int(2000 * scale), 8)
            row = {
                "small tells/s": tells,
                "CPU us per small tell": tell_cpu,
                "ask p50 us": await driver.ask_p50(int(1000 * scale)),
                f"{kilobytes} KB groups/s": groups,
                f"CPU us per {kilobytes} KB group": group_cpu,
            }
            for key, value in row.items():
                table.setdefault(key, {}).setdefault(name, []).append(value)
    print(f"| medians of {rounds} interleaved rounds | ours | bare | ours / bare |")
    print("|---|---|---|---|")
    for key, values in table.items():
        ours, other = (statistics.median(values[name]) for name in ("ours", "bare"))
        print(f"| {key} | {ours:,.0f} | {other:,.0f} | {ours / other:.2f} |")
    await node.stop(1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of messages")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        asyncio.run(serve(args.serve))
        return
    with tempfile.TemporaryDirectory() as name:
        server = subprocess.Popen(
            [sys.executable, __file__, "--serve", name], stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            asyncio.run(measure(Path(name), server.pid, args.rounds, args.scale))
        finally:
            server.kill()
            server.wait()


if __name__ == "__main__":
    main()
