"""How fast a version moves from the trainer to its engines, against what wire and memory allow.

Run: python benchmarks/weights.py [--rounds 3] [--receivers 1 3] [--buckets 16 64 256]
     [--kinds broadcast p2p shared] [--models even qwen3]

Every engine is a process. The floors do nothing but move bytes, no gathering, no digests, no
engine: `broadcast` and `p2p` a bare loop of gloo over the same buckets, `shared` a copy of the
model in all engine processes at once. Rounds of the floors, of syncs to engines that adopt what
arrives and of syncs to engines that copy it (and are read back) alternate in one run, so that
whatever else the machine does meets all alike.

Whole: from the plan until every engine says that it is loaded, by the trainer's clock; as a share
of the floor, of the medians and of the best rounds. Waited: how long the engine that waited longest
did so for buckets, the rest of a load being its own. Paused: the longest pause of an engine, as a
share of the whole. CPU: seconds of all processes together in one sync, and in its floor; they say
what a sync costs where the machine has other work as well. Memory: peak resident memory in the
first sync, above what it was before, of the trainer and of the engine that took most; shared memory
counts at both.

Models: `even` is 512 MiB in tensors of 1 MiB, `qwen3` 500 MB in the shapes of Qwen3-0.6B.

Measured on two cores, 7 rounds, buckets of 64 MiB, engines that adopt (the machine is noisy: its
floors differ by a third from hour to hour). Memory is the trainer's, then an engine's:

                         floor    whole, % of floor  of one with  paused   CPU s      memory
                         GB/s     median   best      digests               (floor)     MiB
    even   1 x broadcast 2.80        99     69         111 %       1 %   0.34 (0.27)    1, 516
           1 x p2p       2.78        90     89         109 %       1 %   0.37 (0.26)    0, 516
           1 x shared    8.34        53     46                     1 %   0.21 (0.06)    0, 516
           3 x broadcast 1.35        79     73          94 %       0 %   0.92 (0.62)  128, 517
           3 x p2p       1.24        84     81         103 %       0 %   0.98 (0.65)    0, 516
           3 x shared    4.56        55     43                     1 %   0.41 (0.22)  128, 517
    qwen3  1 x broadcast 3.35        94     90         112 %       0 %   0.27 (0.21)    0, 480
           1 x p2p       3.08       100     79         110 %       0 %   0.28 (0.23)    0, 480
           1 x shared   10.06        47     48                     0 %   0.17 (0.05)    0, 480
           3 x broadcast 1.22        88     73          95 %       0 %   0.85 (0.61)  120, 481
           3 x p2p       1.21        95     88         108 %       0 %   0.79 (0.62)    0, 481
           3 x shared    4.95        40     50                     0 %   0.47 (0.18)  120, 481
    copied in the place of adopted:
           broadcast, p2p         60 to 73                      24 to 31 %
           shared                 30 to 33                      39 to 44 %

Beside two processes that compute, as training does (`even`, 5 rounds, 3 runs): 1 x p2p 104, 128 and
128 % of the floor, 3 x broadcast 101, 110 and 132 %. `shared` with engines that adopt and nothing
else (7 rounds, 3 runs): 53, 56 and 57 % for 1 engine, 50, 51 and 56 % for 3.

By the size of the buckets (`even`, 5 rounds, with one connection between two members, not two):

                      share of the floor           share of one with digests    shared
                      1 x b'cast p2p  3 x b'cast p2p   1 x           3 x        1 x  3 x
     16 MiB                76 %  70 %                  89 %  89 %               35 %
     64 MiB                86 %  84 %    72 % 102 %    97 % 110 %    89 % 104 %  38 %  51 %
    256 MiB                81 %  90 %                  85 %  93 %               49 %
    512 MiB                76 %  78 %    74 %  86 %    87 %  94 %    92 % 103 %  43 %  50 %

So larger buckets gain nothing that lasts, beyond 64 MiB, but cost a trainer of several engines
their memory.

What is met, by the medians: 90 % of the bare loop for one engine (by the best rounds 69 to 90 %),
and in what was measured beside other work; 50 % of a copy in most runs; the pause of an engine that
adopts (1 of 15 %), and the memory. What is not: 90 % for three engines on two cores with nothing
else to do (79 to 95 %), and 15 % for an engine that copies: its pause is writing and reading back
all of the weights, 0.07 s, whatever the wire does.

Three engines and a trainer keep two cores busy. What a sync costs beyond its floor is CPU: one
digest of all bytes at each end (33 ms of 512 MiB where both cores read what is not in the cache, as
they share 33 GB/s) and, in a broadcast, the copy that packs tensors of less than 16 MiB. Ends on
hosts of their own have more cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch

from ratchet.config import WeightsConfig
from ratchet.transport.weights.base import WeightSender
from ratchet.transport.weights.registry import TRANSPORTS, open_sender
from weights_fleet import HOST, Fleet, Result

FLOORS = {"broadcast": "broadcast", "p2p": "p2p", "shared": "memcpy"}


class Cell(NamedTuple):
    kind: str
    adopt: bool

    def config(self, bucket_mib: float) -> WeightsConfig:
        return WeightsConfig(
            transport="broadcast" if self.kind == "shared" else self.kind,
            shared_memory=self.kind == "shared",
            bucket_mib=bucket_mib,
            # a sender of its own for each cell
            timeout_s=300.0 + self.adopt,
        )


async def throughput(
    model: str, num_receivers: int, kind: str, bucket_mib: float, rounds: int
) -> None:
    fleet = Fleet(model, num_receivers)
    cells = [Cell(kind, adopt) for adopt in (True, False)]
    senders: dict[Cell, WeightSender] = {}
    results: dict[Cell, list[Result]] = defaultdict(list)
    floors: list[Result] = []
    digested: list[Result] = []
    for number in range(rounds + 1):  # the first one warms everything up
        for cell in cells:
            config = cell.config(bucket_mib)
            if cell not in senders:
                senders[cell] = open_sender(config, HOST, fleet.source)
            result = await fleet.sync(senders[cell], config, adopt=cell.adopt)
            results[cell].append(result)
            floor = fleet.floor(FLOORS[kind], result.sizes)
            with_digests = fleet.floor(FLOORS[kind], result.sizes, digests=kind != "shared")
            if number:
                floors.append(floor)
                digested.append(with_digests)
    for cell in cells:
        report(model, num_receivers, bucket_mib, cell, results[cell], floors, digested)
    for sender in senders.values():
        await sender.close()
    fleet.close()


def report(
    model: str,
    num_receivers: int,
    bucket_mib: float,
    cell: Cell,
    results: list[Result],
    floors: list[Result],
    digested: list[Result],
) -> None:
    first, *later = results
    floor, with_digests = (statistics.median(f.wall_s for f in each) for each in (floors, digested))
    whole, waited, paused, cpu = (
        statistics.median(getattr(result, name) for result in later)
        for name in ("wall_s", "waited_s", "paused_s", "cpu_s")
    )
    best = min(f.wall_s for f in floors) / min(result.wall_s for result in later)
    gigabytes = sum(first.sizes) / 1e9
    print(
        f"{model:5} {num_receivers} x {cell.kind:9} {bucket_mib:4g} MiB x {len(first.sizes):3}"
        f" {'adopted' if cell.adopt else 'copied':7}: floor {gigabytes / floor:5.2f} GB/s,"
        f" whole {gigabytes / whole:5.2f} ({floor / whole:4.0%}, best {best:4.0%},"
        f" {with_digests / whole:4.0%} of one with digests),"
        f" waited {waited / whole:4.0%}, paused {paused / whole:4.0%},"
        f" cpu {cpu:4.2f} s (floor {statistics.median(f.cpu_s for f in floors):4.2f}),"
        f" memory {first.trainer_mib:4.0f} and {first.engine_mib:4.0f} MiB",
        flush=True,
    )


async def latency(num_receivers: int, kinds: Sequence[str], rounds: int) -> None:
    fleet = Fleet("small", num_receivers)
    parameters = sum(tensor.numel() for tensor in fleet.source.tensors.values())
    for kind in kinds:
        config = Cell(kind, adopt=True).config(64.0)
        sender = open_sender(config, HOST, fleet.source)
        results, floors = [], []
        for number in range(rounds + 5):
            result = await fleet.sync(sender, config)
            floor = fleet.floor(FLOORS[kind], result.sizes)
            if number >= 5:
                results.append(result)
                floors.append(floor.wall_s)
        walls = sorted(result.wall_s * 1e3 for result in results)
        pauses = [result.paused_s * 1e3 for result in results]
        print(
            f"{num_receivers} x {kind:9} {parameters} parameters, {rounds} syncs: median"
            f" {statistics.median(walls):.1f} ms (p90 {walls[int(rounds * 0.9)]:.1f}), paused"
            f" {statistics.median(pauses):.1f} ms, floor {statistics.median(floors) * 1e3:.1f} ms",
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
    parser.add_argument("--buckets", type=float, nargs="*", default=[16, 64, 256])
    models = ["even", "qwen3"]
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    known = [kind for kind in FLOORS if kind in (*TRANSPORTS, "shared")]
    parser.add_argument("--kinds", nargs="+", choices=known, default=known)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for num_receivers in arguments.receivers:
        asyncio.run(latency(num_receivers, arguments.kinds, 50))
        for bucket_mib in arguments.buckets:
            for model, kind in product(arguments.models, arguments.kinds):
                asyncio.run(throughput(model, num_receivers, kind, bucket_mib, arguments.rounds))


if __name__ == "__main__":
    main()
