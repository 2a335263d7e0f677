"""The mailbox transport against others, between two processes of one machine.

    python benchmarks/mailbox.py [--rounds 15] [--scale 1.0] [--with-ray]

Contenders: ours; a bare asyncio Protocol with msgspec, which has a length in front of each message
and nothing else; the same under mutual TLS; pyzmq; Ray, where it is installed. Ours has all on:
authenticated session, numbers, acks, resend buffers, lanes, traces. Rounds are short and
interleaved in one run, because the machine's load moves more than the differences do: trust the
ratios, which are medians of the ratios of each round.

Last, what a control message waits for while 64 MiB groups follow one another on the bulk lane: from
just before the group is told to the reply, so that what the sender's encoder takes counts too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from mailbox_ends import (
    Bare,
    Client,
    Counter,
    Ours,
    RayClient,
    Zmq,
    make_certificates,
    make_node,
    tls_context,
)
from ratchet.messages import ClaimPrompts, DescribeLineage, GroupFinished, Message
from ratchet.transport.mailbox.base import Trace, current_trace
from ratchet.types import Packed, Rollout, RolloutGroup, RolloutStats, VersionSpan

SMALL = ClaimPrompts("rollout-0", "incarnation-0", 128)
BASE_OF = {
    "ours unix": "bare unix",
    "ours tcp": "bare tcp",
    "bare tls": "bare tcp",
    "pyzmq ipc": "bare unix",
    "pyzmq tcp": "bare tcp",
    "ray": "bare unix",
}
BEHIND = ("ours unix", "ours tcp", "bare unix")


def make_group(num_rollouts: int, num_tokens: int) -> GroupFinished:
    """What a rollout worker sends: token ids and their log-probabilities."""
    rng = np.random.default_rng(0)
    rollouts = tuple(
        Rollout(
            prompt_ids=Packed.of(rng.integers(0, 150_000, 32), "int32"),
            completion_ids=Packed.of(rng.integers(0, 150_000, num_tokens), "int32"),
            behavior_logprobs=Packed.of(rng.normal(size=num_tokens), "float32"),
            loss_mask=Packed.of(np.zeros(0), "uint8"),
            spans=(VersionSpan(1, 0, num_tokens),),
            finish_reason="stop",
            reward=1.0,
            seed=i,
        )
        for i in range(num_rollouts)
    )
    group = RolloutGroup(1, 0, "prompt-1", 0, rollouts)
    return GroupFinished("rollout-0", "incarnation-0", group, RolloutStats("rollout-0", "i"))


# --- the two processes


async def serve(directory: Path) -> None:
    """The receiving process: say where everybody listens, then wait to be killed."""
    loop = asyncio.get_running_loop()
    addresses: dict[str, str] = {}
    for kind, address in (("unix", f"unix:{directory}/ours"), ("tcp", "tcp:127.0.0.1:0")):
        receiver = Counter()
        node = make_node(address, "receiver", lambda name, found=receiver: found)
        await node.start()
        addresses[f"ours {kind}"] = str(node.address)
    await loop.create_unix_server(lambda: Bare(Counter()), str(directory / "bare"))
    for name, context in (("bare tcp", None), ("bare tls", tls_context)):
        if context is not None and not (directory / "ca.pem").exists():
            continue
        tls = None if context is None else context(directory, server=True)
        server = await loop.create_server(lambda: Bare(Counter()), "127.0.0.1", 0, ssl=tls)
        addresses[name] = server.sockets[0].getsockname()[1]
    if importlib.util.find_spec("zmq") is not None:
        ends = [Zmq(Counter(), f"ipc://{directory}/zmq"), Zmq(Counter(), "tcp://127.0.0.1:*")]
        addresses |= {"pyzmq ipc": ends[0].address, "pyzmq tcp": ends[1].address}
    print(json.dumps(addresses), flush=True)
    await asyncio.Event().wait()


@contextlib.contextmanager
def server_in(directory: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Run the receiving process; yield its pid and addresses."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(directory)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.pid, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


@contextlib.asynccontextmanager
async def clients(directory: Path, addresses: dict[str, Any], *, with_ray: bool) -> Any:
    """Connect every contender that is there."""
    loop = asyncio.get_running_loop()
    found: dict[str, Client] = {}
    async with contextlib.AsyncExitStack() as stack:
        for kind, own in (("unix", f"unix:{directory}/sender"), ("tcp", "tcp:127.0.0.1:0")):
            node = make_node(own, "sender", lambda name: None, addresses[f"ours {kind}"])
            await node.start()
            stack.push_async_callback(node.stop, 1.0)
            found[f"ours {kind}"] = Ours(node)
        _, found["bare unix"] = await loop.create_unix_connection(
            lambda: Bare(None), str(directory / "bare")
        )
        for name in ("bare tcp", "bare tls"):
            if name in addresses:
                tls = tls_context(directory, server=False) if name == "bare tls" else None
                _, found[name] = await loop.create_connection(
                    lambda: Bare(None), "127.0.0.1", addresses[name], ssl=tls
                )
        for name in ("pyzmq ipc", "pyzmq tcp"):
            if name in addresses:
                found[name] = end = Zmq(None, addresses[name])
                stack.callback(end.close)
        if with_ray:
            found["ray"] = ray = RayClient()
            stack.callback(ray.close)
        yield found


# --- the measurement


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

    def __init__(self, client: Client, cpu: Any) -> None:
        self._client = client
        self._cpu = cpu
        self._told = 0

    async def rate(self, message: Message, count: int, burst: int) -> tuple[float, float]:
        """Messages per second, and microseconds of CPU per message, both ends together."""
        cpu_begin, begin = self._cpu(), time.perf_counter()
        confirmed: deque[Awaitable[Any]] = deque()
        num_bursts = max(1, count // burst)
        for _ in range(num_bursts):
            for _ in range(burst):
                self._client.tell(message)
            self._told += burst
            confirmed.append(self._client.ask(DescribeLineage((self._told,))))
            if len(confirmed) > 2:
                await confirmed.popleft()
        for each in confirmed:
            await each
        spent = time.perf_counter() - begin
        num_told = num_bursts * burst
        return num_told / spent, (self._cpu() - cpu_begin) / num_told * 1e6

    async def ask_p50(self, count: int) -> float:
        """Median microseconds of an ask."""
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            await self._client.ask(DescribeLineage((0,)))
            times.append(time.perf_counter() - begin)
        return statistics.median(times) * 1e6

    async def behind(self, message: Message) -> list[float]:
        """Milliseconds of each ask while a large message is on its way."""
        times = []
        begin = time.perf_counter()
        self._client.tell(message)
        self._told += 1
        reply = self._client.ask(DescribeLineage((0,)))
        arrived = asyncio.ensure_future(self._client.ask(DescribeLineage((self._told,))))
        while True:
            await reply
            times.append((time.perf_counter() - begin) * 1e3)
            if arrived.done():
                return times
            begin = time.perf_counter()
            reply = self._client.ask(DescribeLineage((0,)))


Rows = dict[str, dict[str, list[float]]]


async def one_round(driver: Driver, group: GroupFinished, scale: float) -> dict[str, float]:
    tells, tell_cpu = await driver.rate(SMALL, int(20_000 * scale), 256)
    groups, group_cpu = await driver.rate(group, int(480 * scale), 8)
    return {
        "tells": tells,
        "ask": await driver.ask_p50(int(300 * scale)),
        "groups": groups,
        "tell_cpu": tell_cpu,
        "group_cpu": group_cpu,
    }


async def measure(args: argparse.Namespace, directory: Path) -> None:
    current_trace.set(Trace(uuid.uuid4().hex, 7))
    group = make_group(8, 1000)
    kilobytes = round(len(msgspec.msgpack.encode(group)) / 1000)
    with server_in(directory) as (server_pid, addresses):
        async with clients(directory, addresses, with_ray=args.with_ray) as found:
            cpu = Cpu(server_pid)
            drivers = {name: Driver(client, cpu) for name, client in found.items()}
            rows: Rows = {name: {} for name in drivers}
            for index in range(args.rounds + 1):
                for name, driver in drivers.items():
                    row = await one_round(driver, group, args.scale)
                    for key, value in row.items() if index else ():  # the first one warms up
                        rows[name].setdefault(key, []).append(value)
            report(rows, kilobytes, args.rounds)
            await report_behind({name: drivers[name] for name in BEHIND}, args.large)


def report(rows: Rows, kilobytes: int, rounds: int) -> None:
    print(f"medians of {rounds} interleaved rounds; x: the median ratio to the bare Protocol\n")
    print(
        f"| | small tells/s | x | ask p50 us | x | {kilobytes} KB groups/s | x "
        "| CPU us per tell | per group |"
    )
    print("|---" * 9 + "|")
    for name, row in rows.items():
        base = rows[BASE_OF.get(name, name)]
        cells = []
        for key in ("tells", "ask", "groups"):
            ratios = [mine / its for mine, its in zip(row[key], base[key], strict=True)]
            cells += [f"{statistics.median(row[key]):,.0f}", f"{statistics.median(ratios):.2f}"]
        cells += [f"{statistics.fmean(row[key]):.1f}" for key in ("tell_cpu", "group_cpu")]
        print(f"| {name} | {' | '.join(cells)} |")


async def report_behind(drivers: dict[str, Driver], count: int) -> None:
    large = make_group(64, 128 << 10)
    times: dict[str, list[float]] = {name: [] for name in drivers}
    for _ in range(count):
        for name, driver in drivers.items():
            times[name] += await driver.behind(large)
    print(f"\nms of a control message behind a 64 MiB group, {count} groups each\n")
    print("| | p50 | p99 | max | control messages |\n|---|---|---|---|---|")
    for name, each in times.items():
        each.sort()
        p99 = each[int(0.99 * (len(each) - 1))]
        print(
            f"| {name} | {statistics.median(each):.2f} | {p99:.1f} | {each[-1]:.1f} | {len(each)} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of messages")
    parser.add_argument("--large", type=int, default=10, help="64 MiB groups to send, each")
    parser.add_argument("--with-ray", action="store_true")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        asyncio.run(serve(args.serve))
        return 0
    if args.with_ray and importlib.util.find_spec("ray") is None:
        print("--with-ray: Ray is not installed here: pip install ray", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        if importlib.util.find_spec("zmq") is None:
            print("pyzmq is skipped: it is not installed (pip install pyzmq)")
        if importlib.util.find_spec("trustme") is None:
            print("bare tls is skipped: trustme is not installed (pip install trustme)")
        else:
            make_certificates(Path(name))
        asyncio.run(measure(args, Path(name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
