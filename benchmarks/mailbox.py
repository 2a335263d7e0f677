"""The mailbox transport against a bare asyncio Protocol with msgspec: two processes, one Unix socket.

    python benchmarks/mailbox.py [--rounds 7] [--scale 1.0]

Ours has everything on: authenticated session, numbers, acks, resend buffers, lanes, traces. The bare
one has a length and msgpack of the same messages and nothing else. Rounds are interleaved in one
run, because the machine's load moves more than the difference does; trust medians and ratios.
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
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

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
    """The receiver: counts tells, answers an ask for n once it has had n since it was last asked."""

    name = "receiver"

    def __init__(self) -> None:
        self._count = 0
        self._waiting: tuple[int, asyncio.Future[Message]] | None = None

    def tell(self, message: Message) -> None:
        self._count += 1
        self._settle()

    def ask(
        self, message: Any, *, block: bool = False, timeout: float = 0.0
    ) -> asyncio.Future[Message]:
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        if not message.versions:
            future.set_result(LineageDescribed(()))
            return future
        self._waiting = (message.versions[0], future)
        self._settle()
        return future

    def watch(self, watcher: Any) -> None:
        raise NotImplementedError

    def _settle(self) -> None:
        if self._waiting is not None and self._count >= self._waiting[0]:
            self._waiting[1].set_result(LineageDescribed(()))
            self._waiting = None
            self._count = 0


class Client(Protocol):
    async def tell_all(self, message: Message, count: int) -> None: ...
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
        self._node = node
        self._ref = node.ref("receiver")

    async def tell_all(self, message: Message, count: int) -> None:
        for i in range(count):
            self._ref.tell(message)
            if i % 64 == 63:
                await asyncio.sleep(0)
                while self._node.peers()[0].num_queued > 1024:
                    await asyncio.sleep(0)

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
        self._room = asyncio.Event()
        self._room.set()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

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

    async def tell_all(self, message: Message, count: int) -> None:
        for i in range(count):
            self._write(BareTell(message))
            if i % 64 == 63:
                await asyncio.sleep(0)
            await self._room.wait()

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


async def rate(client: Client, message: Message, count: int) -> float:
    begin = time.perf_counter()
    await client.tell_all(message, count)
    await client.ask(DescribeLineage((count,)))
    return count / (time.perf_counter() - begin)


async def ask_p50(client: Client, count: int) -> float:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        await client.ask(DescribeLineage(()))
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


async def measure(directory: Path, rounds: int, scale: float) -> None:
    node = make_node(directory, "sender", lambda name: None)
    await node.start()
    loop = asyncio.get_running_loop()
    _, bare = await loop.create_unix_connection(lambda: Bare(None), str(directory / "bare"))
    clients: dict[str, Client] = {"ours": Ours(node), "bare": bare}
    group = make_group()
    group_bytes = len(msgspec.msgpack.encode(group))
    rows: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for name, client in clients.items():
            for row, value in (
                ("small tells/s", await rate(client, SMALL, int(50_000 * scale))),
                ("ask p50 us", await ask_p50(client, int(1000 * scale))),
                (
                    f"{group_bytes // 1000} KB groups/s",
                    await rate(client, group, int(2000 * scale)),
                ),
            ):
                rows.setdefault(row, {}).setdefault(name, []).append(value)
    print(f"| medians of {rounds} interleaved rounds | ours | bare | ours / bare |\n|---|---|---|---|")
    for row, values in rows.items():
        ours, bare_value = (statistics.median(values[name]) for name in ("ours", "bare"))
        print(f"| {row} | {ours:,.0f} | {bare_value:,.0f} | {ours / bare_value:.2f} |")
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
            asyncio.run(measure(Path(name), args.rounds, args.scale))
        finally:
            server.kill()
            server.wait()


if __name__ == "__main__":
    main()
