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

Measured on two cores with nothing else to do (load 1), niceness -10, 7 rounds, buckets of 64 MiB,
engines that adopt:

                         floor      whole, share of floor   paused   CPU s     memory, MiB
                         GB/s       median      best                 (floor)   trainer, engine
    even   1 x broadcast 3.61       81 %        78 %        1 %      0.31 (0.21)    1, 516
           1 x p2p       3.75       79 %        74 %        0 %      0.30 (0.20)    0, 512
           1 x shared    8.78       52 %        52 %        1 %      0.21 (0.06)    0, 512
           3 x broadcast 1.51       71 %        70 %        0 %      0.84 (0.55)  128, 516
           3 x p2p       1.45       83 %        81 %        0 %      0.85 (0.56)    0, 512
           3 x shared    4.69       52 %        50 %        0 %      0.42 (0.22)  128, 512
    qwen3  1 x broadcast 3.60       79 %        73 %        0 %      0.26 (0.19)    0, 480
           1 x p2p       3.44       84 %        72 %        0 %      0.26 (0.20)    0, 477
           1 x shared    9.12       51 %        54 %        0 %      0.18 (0.06)    0, 477
           3 x broadcast 1.53       79 %        64 %        0 %      0.70 (0.50)  120, 481
           3 x p2p       1.45       87 %        81 %        0 %      0.70 (0.53)    0, 477
           3 x shared    4.72       54 %        56 %        0 %      0.34 (0.20)  120, 477
    copied in the place of adopted:
           broadcast, p2p           54 to 65 %              25 to 31 %
           shared                   31 to 33 %              37 to 42 %

The same by size of the buckets, and as a share of a bare loop that computes a digest of each bucket
at both ends and does nothing else; `even`, engines that adopt, 5 rounds, on a day on which the
floors were slower (1 engine 2.3 to 3.5 GB/s, 3 engines 1.1 to 1.3):

                      share of the floor           share of one with digests    shared
                      1 x b'cast p2p  3 x b'cast p2p   1 x           3 x        1 x  3 x
     16 MiB                76 %  70 %                  89 %  89 %               35 %
     64 MiB                86 %  84 %    72 % 102 %    97 % 110 %    89 % 104 %  38 %  51 %
    256 MiB                81 %  90 %                  85 %  93 %               49 %
    512 MiB                76 %  78 %    74 %  86 %    87 %  94 %    92 % 103 %  43 %  50 %

(qwen3, 64 MiB, 1 engine: 72 % and 93 % of the floor, 80 % and 92 % of one with digests, shared
48 %.) So larger buckets gain nothing that lasts, beyond 64 MiB, but cost a trainer of several
engines their memory.

What is met: 50 % of a copy on a quiet day (35 to 51 % on the other), the pause of an engine that
adopts (1 of 15 %), and the memory. What is not: 90 % of the bare loop, and 15 % for an engine that
copies: its pause is writing and reading back all of the weights, 0.07 s, whatever the wire does.

The 90 % is digests and the scheduler. The bare loop alone uses 70 % of both cores; a digest of
512 MiB that is not in the cache takes 20 to 32 ms at each end, beside 142 ms. What verifies all
bytes at both ends can be compared with a loop that does so too: that is 80 to 110 %. With all of it
under real-time scheduling (chrt -r 5), where no thread is put aside for another, a sync takes 137
to 159 ms and its floor 161 to 174 (102 to 126 %). Tried in bare loops with digests, without a gain
beyond the noise: pieces of 1, 4 and 16 MiB, windows of 2 to 64 of them, a process per core, huge
pages, longer and shorter time slices (sched_setattr) for the threads that compute digests, and
niceness. Where the ends are on hosts of their own they have twice the cores.
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
