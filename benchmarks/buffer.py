"""What the buffer costs per group, at each size and capacity: `python -m benchmarks.buffer`.

    python -m benchmarks.buffer [--rounds 3] [--groups 600] [--with-ray]

Three measurements, all of ours with the durable ledger on a file:

* put and get: the product's BufferActor, its messages handed straight to `receive`. A put is a
  finished group, a get is a request and its batch of 4, while the queue is full up to the capacity.
  Groups share their arrays, so that 8,192 of 10 MB fit in memory: nothing here copies them.
* over a link: the buffer in a process of its own behind a mailbox node on a Unix socket, as a run
  on one machine has it, between a worker that finishes whatever it is handed and a trainer that
  asks for batch after batch, capacity 8; both in one process. The lag of the buffer's loop is how
  late a timer of 5 ms comes meanwhile.
* `--with-ray`: an asyncio.Queue in a Ray actor, on the same machine, from one process, as many
  groups on their way. Per group it does a put and a quarter of a get. Ours does more: it issues the
  prompt under a lease, writes five transitions to the ledger, and hears what became of the batch.

Rates of put and get are per second of CPU, times are wall clock. Rounds are interleaved; numbers
are medians, ratios are medians of the ratios within rounds.

Measured on two cores with nothing else to do, 4 rounds of 600 groups:

    group   capacity  groups per CPU s  of 8's   put p50    p99   get p50    p99  (us)
    1 KB           8            11,055    1.00        25     49       186    254
    1 KB         128            10,554    0.96        25     64       189    416
    1 KB       1,024            10,331    0.94        26     67       189    410
    1 KB       8,192             9,964    0.90        26     63       182   1446
    100 KB         8            10,544    1.00        26     67       189    405
    100 KB     8,192             9,805    0.92        26     69       184   1498
    10 MB          8            10,174    1.00        26     61       193    454
    10 MB      8,192             9,692    0.92        27     64       187   1442

So it is flat in the capacity to within 10%.

On the same machine, 7 rounds, in one run (the lag is that of the buffer's loop, in ms):

    over a link         groups/s   CPU us per group           lag p50    p99   most
    1 KB    ours           4,093                325               0.5    2.0    3.3
    1 KB    in Ray           780              1,708    ours: 5.3 times the rate, 1/5.5 of the CPU
    100 KB  ours           2,621                558               0.7    2.7    4.3
    100 KB  in Ray           473              3,000    ours: 5.2 times the rate, 1/5.1 of the CPU
    10 MB   ours             304              5,000               0.7    5.5    7.5
    10 MB   in Ray            43             28,333    ours: 6.4 times the rate, 1/5.3 of the CPU

Rates move by half from hour to hour, on both sides; this was a slow one (on another day ours were
5,285, 3,180 and 400). In six runs of 7 rounds it was 5.3 to 6.5 times Ray's rate at 1 KB (median
5.5), 5.1 to 5.7 at 100 KB (median 5.2; 5.2 to 5.6 in three of 15 rounds) and 6.2 to 8.5 at 10 MB
(median 7.1, with huge pages, see `huge_pages.py`; 4.0 to 5.0 without, on an earlier day): 5 times
or more in each. The lag is within its 50 ms. A client of Ray that keeps two gets on their way is
faster than the one here: 3.8 and 3.5 times at 1 KB and 100 KB, in an earlier state; ours has gained
since, and was not measured against it again.

Where the time goes: at 1 KB and 100 KB the buffer's process is the bound, with 170 and 290 us of
CPU per group (before one statement issued it to its worker). A third each is SQLite (commits most),
Python that has no one place, and the kernel with all else. At 10 MB it is the worker's copy. Tried
without a gain beyond the noise: uvloop, a larger write-ahead log, groups of 100 KB shared by their
worker (dearer). On a host that gives huge pages to all shared memory (`shmem_enabled` of
`within_size`) 10 MB went at 677 to 783 groups/s.
Both sides have 8 groups on their way: Ray's client puts 4 ahead of the 4 that it takes, ours has
the capacity 8, in flight or finished. CPU is that of both processes (of Ray's: all of them), in
steps of 10 ms, over 1,200 groups, 60 of 10 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib.util
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from benchmarks.mailbox_ends import Log, make_node
from tests.helpers.config import small_config
from tests.helpers.driven_buffer import LIFE, DrivenBuffer, assignments

from ratchet.actors.buffer import BufferActor
from ratchet.actors.system import System
from ratchet.config import Config
from ratchet.messages import (
    BatchReady,
    ClaimPrompts,
    GroupFinished,
    Message,
    PromptsClaimed,
    RequestBatch,
    RoleRegistered,
    StepTrained,
)
from ratchet.runtime.role import freeze_imports
from ratchet.storage.ledger import GroupLedger
from ratchet.types import (
    Assignment,
    Packed,
    Prompt,
    RoleInfo,
    Rollout,
    RolloutGroup,
    RolloutStats,
    VersionRecord,
    VersionSpan,
)

SIZES = {"1 KB": 1_000, "100 KB": 100_000, "10 MB": 10_000_000}
CAPACITIES = (8, 128, 1024, 8192)
BATCH = 4
GROUP_SIZE = 4
FIRST = VersionRecord(0, 1, 0, None, "live", "d")
TICK_S = 0.005
WARM = 8 * BATCH
"""Groups over a link before those that count: the links are open, and what is made once is made."""


class Quiet(Log):
    """Says nothing of the end of a round, which is a loss to whoever is still there."""

    def warning(self, event: str, **fields: Any) -> None: ...

    error = warning


def make_config(capacity: int, batch_groups: int = BATCH) -> Config:
    return small_config(
        rollout={"group_size": GROUP_SIZE},
        buffer={
            "batch_groups": batch_groups,
            "capacity_factor": capacity / batch_groups,
            "max_staleness": 10**6,
            "lease_s": 3600.0,
        },
    )


def make_rollouts(num_bytes: int) -> tuple[Rollout, ...]:
    """Of a group of about so many bytes: token ids, log-probabilities and a mask."""
    tokens = max(1, num_bytes // GROUP_SIZE // 9)
    return tuple(
        Rollout(
            prompt_ids=Packed("int32", bytes(4 * 16)),
            completion_ids=Packed("int32", bytes(4 * tokens)),
            behavior_logprobs=Packed("float32", bytes(4 * tokens)),
            loss_mask=Packed("uint8", b"\1" * tokens),
            spans=(VersionSpan(0, 0, tokens),),
            finish_reason="stop",
            reward=float(seed % 2),
            seed=seed,
        )
        for seed in range(GROUP_SIZE)
    )


def finished(given: Assignment, rollouts: tuple[Rollout, ...]) -> GroupFinished:
    group = RolloutGroup(
        given.group_id, given.attempt, given.prompt.prompt_id, given.epoch, rollouts
    )
    return GroupFinished("rollout-0", "i", group, RolloutStats("rollout-0", "i"))


# --- put and get


class Times(NamedTuple):
    """Of one round: CPU us per group, all in all; sorted us of wall clock of each put and get."""

    per_group: float
    puts: list[float]
    gets: list[float]


def put_and_get(num_bytes: int, capacity: int, groups: int, directory: Path) -> Times:
    loop = asyncio.new_event_loop()
    ledger = GroupLedger.open(directory / "ledger.sqlite")
    buffer = DrivenBuffer(make_config(capacity), 1000, loop, ledger)
    rollouts = make_rollouts(num_bytes)
    buffer.receive(RoleRegistered((), (FIRST,)))
    buffer.receive(ClaimPrompts("rollout-0", "i", 10**9, 0, LIFE))
    ready: list[Assignment] = []

    def take() -> list[BatchReady]:
        told = buffer.take_told()
        ready.extend(given for _, _, given in assignments(told))
        return [message for _, message in told if isinstance(message, BatchReady)]

    take()
    for given in ready[: capacity - BATCH]:  # full, but for one batch that is in flight
        buffer.receive(finished(given, rollouts))
    del ready[: capacity - BATCH]
    buffer._table.flush()  # what filled it is no part of what follows
    gc.collect()
    puts, gets, cpu = [], [], 0.0
    for step in range(groups // BATCH):
        messages = [finished(given, rollouts) for given in ready[:BATCH]]
        del ready[:BATCH]
        began = time.process_time()
        for message in messages:
            since = time.perf_counter()
            buffer.receive(message)  # and its turn ends
            puts.append(time.perf_counter() - since)
        since = time.perf_counter()
        buffer.receive(RequestBatch("trainer-0", 1, 0, step, None, LIFE))
        gets.append(time.perf_counter() - since)
        (batch,) = take()
        ids = tuple(group.group_id for group in batch.batch.groups)
        buffer.receive(StepTrained(1, step + 1, ids, {}))
        cpu += time.process_time() - began
    buffer.end()
    loop.close()
    return Times(cpu / len(puts) * 1e6, sorted(puts), sorted(gets))


def cpu_of_all() -> float:
    """Seconds of CPU that this process and all below it have used."""
    mine = psutil.Process()
    spent = 0.0
    for process in [mine, *mine.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            spent += sum(process.cpu_times()[:2])
    return spent


def quantile(times: list[float], share: float) -> float:
    return times[int(share * (len(times) - 1))] * 1e6


def report_put_and_get(rounds: int, groups: int) -> None:
    found: dict[tuple[str, int], list[Times]] = {}
    for index in range(rounds + 1):
        for size, num_bytes in SIZES.items():
            for capacity in CAPACITIES:
                with tempfile.TemporaryDirectory() as name:
                    times = put_and_get(num_bytes, capacity, groups, Path(name))
                if index:  # the first one warms up
                    found.setdefault((size, capacity), []).append(times)
    print("group   capacity  groups per CPU s  of 8's   put p50    p99   get p50    p99  (us)")
    for (size, capacity), each in found.items():
        base = found[size, CAPACITIES[0]]
        ratio = statistics.median(
            b.per_group / a.per_group for a, b in zip(each, base, strict=True)
        )
        cost = statistics.median(times.per_group for times in each)
        cells = [
            statistics.median(quantile(getattr(times, what), share) for times in each)
            for what in ("puts", "gets")
            for share in (0.5, 0.99)
        ]
        print(
            f"{size:7} {capacity:8,} {1e6 / cost:17,.0f} {ratio:7.2f}"
            f" {cells[0]:9.0f} {cells[1]:6.0f} {cells[2]:9.0f} {cells[3]:6.0f}"
        )


# --- over a link


async def serve(directory: Path, capacity: int, others: dict[str, str]) -> None:
    """The buffer's process: say where it listens, and at the end of stdin how late its loop was."""
    found: list[Any] = []
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # of letters that the end left over
    node = make_node(
        f"unix:{directory}/buffer",
        "buffer",
        lambda n: found[0] if found and n == "buffer" else None,
    )
    node._locate = lambda name: _address(others[name])  # type: ignore[method-assign]
    await node.start()
    system = System(
        rng=random.Random(0),
        wall_time=time.time,
        new_id=lambda: uuid.uuid4().hex,
        log=Quiet(),
        remote=node,
    )
    ledger = GroupLedger.open(directory / "ledger.sqlite")
    role = RoleInfo("buffer", "buffer", LIFE)
    prompts = [Prompt(f"p{i}", f"problem {i}") for i in range(1000)]
    config = make_config(capacity)
    found.append(BufferActor.start(system, role, config=config, prompts=prompts, ledger=ledger))
    print(json.dumps(str(node.address)), flush=True)
    freeze_imports()
    loop = asyncio.get_running_loop()
    end = loop.run_in_executor(None, sys.stdin.read)
    lags = []
    while not end.done():
        due = loop.time() + TICK_S
        await asyncio.sleep(TICK_S)
        lags.append(loop.time() - due)
    lags.sort()
    print(json.dumps([quantile(lags, share) / 1e3 for share in (0.5, 0.99, 1.0)]))
    sys.stdout.flush()
    os._exit(0)


def _address(text: str) -> Any:
    from ratchet.transport.mailbox.address import Address

    return Address.parse(text)


class Others:
    """The worker, the trainer and the registry of the other process."""

    def __init__(self, rollouts: tuple[Rollout, ...], wanted: int) -> None:
        self._rollouts = rollouts
        self._wanted = wanted
        self.buffer: Any = None
        self.num_trained = self.num_ended = 0
        self.warm, self.done = asyncio.Event(), asyncio.Event()

    def tell(self, message: Message) -> None:
        if self.done.is_set():
            return
        if isinstance(message, PromptsClaimed):
            for given in message.assignments:
                self.num_ended += 1
                self.buffer["rollout-0"].tell(finished(given, self._rollouts))
            self.claim(self.num_ended)
        elif isinstance(message, BatchReady):
            ids = tuple(group.group_id for group in message.batch.groups)
            self.num_trained += len(ids)
            step = message.batch.step
            self.buffer["trainer-0"].tell(StepTrained(1, step, ids, {}))
            self.request(step)
            if self.num_trained >= WARM:
                self.warm.set()
            if self.num_trained >= WARM + self._wanted:
                self.done.set()

    def claim(self, ended: int) -> None:
        self.buffer["rollout-0"].tell(ClaimPrompts("rollout-0", "i", BATCH + ended, 0, LIFE))

    def request(self, step: int) -> None:
        self.buffer["trainer-0"].tell(RequestBatch("trainer-0", 1, 0, step, None, LIFE))

    def ask(self, message: Any, *, block: bool = False, timeout: float = 0.0) -> Any:
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        future.set_result(RoleRegistered((), (FIRST,)))
        return future

    def watch(self, watcher: Any) -> None: ...


async def over_a_link(num_bytes: int, capacity: int, groups: int, directory: Path) -> list[float]:
    """Return (groups per second, us of CPU per group, ms of lag: p50, p99, most)."""
    others = Others(make_rollouts(num_bytes), groups)
    names = ("registry", "rollout-0", "trainer-0")
    located: list[str] = []
    nodes = {
        name: make_node(f"unix:{directory}/{name}", name, lambda n: others if n in names else None)
        for name in names
    }
    for node in nodes.values():
        node._locate = lambda _: _address(located[0])  # type: ignore[method-assign]
        await node.start()
    addresses = {name: str(node.address) for name, node in nodes.items()}
    command = [sys.executable, "-m", "benchmarks.buffer", "--serve", str(directory)]
    command += ["--capacity", str(capacity), "--others", json.dumps(addresses)]
    with running(command) as process:
        located.append(json.loads(await asyncio.to_thread(process.stdout.readline)))
        others.buffer = {name: node.ref("buffer") for name, node in nodes.items()}
        others.claim(0)
        others.request(0)
        await others.warm.wait()
        before, began, since = others.num_trained, cpu_of_all(), time.perf_counter()
        await others.done.wait()
        trained = others.num_trained - before
        rate = trained / (time.perf_counter() - since)
        cpu = (cpu_of_all() - began) / trained * 1e6
        for node in nodes.values():
            await node.stop(1.0)
        process.stdin.close()
        lags = json.loads(await asyncio.to_thread(process.stdout.readline))
        process.wait()
    return [rate, cpu, *lags]


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[Any]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class RayQueue:
    """An asyncio.Queue in an actor of Ray: what a buffer is elsewhere."""

    def __init__(self) -> None:
        import ray

        ray.init(address="local", include_dashboard=False, num_cpus=2, log_to_driver=False)

        class Buffer:
            def __init__(self) -> None:
                self.queue: Any = None

            async def put(self, group: Any) -> None:
                self.queue = self.queue or asyncio.Queue()
                await self.queue.put(group)

            async def get(self, number: int) -> list[Any]:
                self.queue = self.queue or asyncio.Queue()
                return [await self.queue.get() for _ in range(number)]

        self._ray = ray
        self._actor = ray.remote(Buffer).remote()

    def rate(self, num_bytes: int, groups: int, in_flight: int) -> tuple[float, float]:
        """Return (groups per second, put and got; us of CPU per group)."""
        rollouts = make_rollouts(num_bytes)
        prompt = Prompt("p", "problem")
        message = finished(Assignment(0, 0, 0, prompt, GROUP_SIZE, 1.0), rollouts)
        for _ in range(in_flight - BATCH):
            self._actor.put.remote(message)
        self._batches(message, WARM // BATCH)
        began, since = cpu_of_all(), time.perf_counter()
        self._batches(message, groups // BATCH)
        rate = groups / (time.perf_counter() - since)
        cpu = (cpu_of_all() - began) / groups * 1e6
        self._ray.get(self._actor.get.remote(in_flight - BATCH))
        return rate, cpu

    def _batches(self, message: GroupFinished, number: int) -> None:
        for _ in range(number):
            for _ in range(BATCH):
                self._actor.put.remote(message)
            self._ray.get(self._actor.get.remote(BATCH))

    def close(self) -> None:
        self._ray.shutdown()


def report_over_a_link(rounds: int, *, with_ray: bool) -> None:
    queue = RayQueue() if with_ray else None
    print(
        "\nover a link         groups/s   CPU us per group   lag of the loop p50    p99   most (ms)"
    )
    for size, num_bytes in SIZES.items():
        groups = 60 if num_bytes > 10**6 else 1200
        rows, rays = [], []
        for index in range(rounds + 1):
            with tempfile.TemporaryDirectory() as name:
                row = asyncio.run(over_a_link(num_bytes, 2 * BATCH, groups, Path(name)))
            ray = queue.rate(num_bytes, groups, 2 * BATCH) if queue else (0.0, 0.0)
            if index:
                rows.append(row)
                rays.append(ray)
        cells = [statistics.median(each) for each in zip(*rows, strict=True)]
        print(
            f"{size:7} ours   {cells[0]:13,.0f} {cells[1]:18,.0f} {cells[2]:21.1f} {cells[3]:6.1f}"
            f" {cells[4]:6.1f}"
        )
        if queue:
            rate, cpu = (statistics.median(each) for each in zip(*rays, strict=True))
            pairs = list(zip(rows, rays, strict=True))
            faster = statistics.median(mine[0] / its[0] for mine, its in pairs)
            cheaper = statistics.median(its[1] / mine[1] for mine, its in pairs)
            print(
                f"{size:7} in Ray {rate:13,.0f} {cpu:18,.0f}    ours: {faster:.1f} times the rate,"
                f" 1/{cheaper:.1f} of the CPU",
                flush=True,
            )
    if queue:
        queue.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=600, help="per round, size and capacity")
    parser.add_argument("--with-ray", action="store_true")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--capacity", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--others", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        asyncio.run(serve(args.serve, args.capacity, args.others))
        return 0
    if args.with_ray and importlib.util.find_spec("ray") is None:
        print("--with-ray: Ray is not installed here: pip install ray", file=sys.stderr)
        return 2
    report_put_and_get(args.rounds, args.groups)
    report_over_a_link(args.rounds, with_ray=args.with_ray)
    return 0


if __name__ == "__main__":
    sys.exit(main())
