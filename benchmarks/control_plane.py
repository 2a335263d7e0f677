"""What registry, buffer and ledger cost as a run grows: `python -m benchmarks.control_plane`.

The product's VersionRegistry, BufferActor and GroupLedger on a loop with virtual time, between as
many fake rollout workers as asked for and a fake trainer. A fake is a recipient without an actor:
it holds `SLOTS` groups, finishes each after a random time and claims the next. The trainer asks for
batches of half of what is in flight at most, reserves and commits a version for each. Nothing
crosses a link (that is `benchmarks/mailbox.py`).

Prints, per number of engines, CPU of this process less what the fakes took: us per group from
claim to training, us per engine that joins and per engine that leaves with its groups in flight;
and bytes of Python objects per open group at the peak (by tracemalloc, in a run of its own, with
the ledger on a file).

A batch is half of what is in flight, as it has to be to keep the engines busy: versions per group
fall as engines rise, and what a version costs (a message to each engine) stays the same per group.

Measured on two quiet cores (load 1), one round. us of CPU, with ledger and versions in memory, and
on files:

                          in memory                          on files
    engines    groups     per group  of 10's   join  leave   per group  of 10's   join  leave
         10    10,000          72.7     1.00    116    161        89.4     1.00    187    167
        100    20,000          65.0     0.89     50    128        82.6     0.91     64    144
      1,000   100,000          69.3     0.95     44    127        83.1     0.91     50    133
     10,000   100,000          80.7     1.12     42    131        97.3     1.07     50    138

It was 1.41 and 1.26 at 10,000 engines (80.4 and 114.0 us in memory, 102.8 and 131.0 on files). What
grew, found by sampling the process with perf and by timing each collection (gc.callbacks), at 10
engines beside 10,000, on a loaded machine:

* The garbage collector, 0.3 and 11 to 12 us per group: with 80,000 groups open all that a group is
  made of outlives two generations, and each full collection walks through it. Groups and their
  entries are `gc=False` since, and the fakes here hold atoms: 0.1 and 1.3 us.
* SQLite, two indexes that each transition changed (states of groups, events by group), in trees as
  large as what is open: the ledger alone took 40 and 57 us per group with 80 and 80,000 groups open
  on a file. Without them, and with batches in the order of the table, 22 and 34.
* The rest has no one place: lookups in dicts, comparisons and copies that miss the caches (1 to 3
  us each, in `_Py_dict_lookup`, `PyObject_RichCompare`, `memmove`, and in the ledger's table).

Memory at the peak: 1,820, 1,169, 990 and 935 bytes per open group for 10, 100, 1,000 and 10,000
engines (80, 800, 8,000 and 80,000 groups open).
"""

import argparse
import asyncio
import gc
import heapq
import itertools
import random
import statistics
import tempfile
import time
import tracemalloc
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers.config import small_config
from tests.simulation.loop import run_virtual

from ratchet.actors.buffer import BufferActor
from ratchet.actors.role import BUFFER, REGISTRY, TRAINER, rollout_name
from ratchet.actors.system import System
from ratchet.actors.version_registry import VersionRegistry
from ratchet.messages import (
    AcquireTerm,
    BatchReady,
    ClaimPrompts,
    CommitVersion,
    Down,
    GroupFinished,
    Message,
    PromptsClaimed,
    RegisterRole,
    RequestBatch,
    ReserveVersion,
    StepTrained,
)
from ratchet.storage.ledger import GroupLedger
from ratchet.storage.versions import VersionStore
from ratchet.types import (
    Packed,
    Prompt,
    RoleInfo,
    Rollout,
    RolloutGroup,
    RolloutStats,
    VersionSpan,
)

SLOTS = 8
LIFE = "buffer/0"
GROUP_S = (5.0, 25.0)
BURST = 16
"""Groups that finish at once, whatever the number of engines: each size has as many turns of the
loop per group, which are this benchmark's and not the control plane's."""
GROUP_SIZE = 8
SIZES = {10: 10_000, 100: 20_000, 1_000: 100_000, 10_000: 100_000}


class NoLog:
    def debug(self, event: str, **fields: Any) -> None: ...

    info = warning = error = debug


class Meter:
    """CPU seconds of the process, less those inside `fake`."""

    def __init__(self) -> None:
        self._fake = 0.0
        self._started = 0.0

    def start(self) -> None:
        self._fake, self._started = 0.0, time.process_time()

    def stop(self) -> float:
        return time.process_time() - self._started - self._fake

    def fake(self, function: Callable[..., None], *args: Any) -> None:
        before = time.process_time()
        function(*args)
        self._fake += time.process_time() - before


class Fake:
    """A recipient that only notes what it is told."""

    depth = 0

    def __init__(self, kind: Any, name: str, mail: deque[tuple[Any, Message]]) -> None:
        self.name = name
        self.role = RoleInfo(kind, name, f"{name}/0")
        self._mail = mail
        self.watchers: list[Any] = []

    def tell(self, message: Message) -> None:
        self._mail.append((self, message))

    def watch(self, watcher: Any) -> None:
        self.watchers.append(watcher)

    def is_alive(self) -> bool:
        return True


class Engine(Fake):
    finished = 0


class Run:
    """One run of one size."""

    def __init__(self, num_engines: int, num_groups: int, directory: Path | None) -> None:
        self.meter = Meter()
        self.num_groups = num_groups
        self.mail: deque[tuple[Any, Message]] = deque()
        self.engines = [Engine("rollout", rollout_name(i), self.mail) for i in range(num_engines)]
        self.trainer = Fake("trainer", TRAINER, self.mail)
        self.batch_groups = num_engines * SLOTS // 2
        self._tick_s = BURST * statistics.fmean(GROUP_S) / (num_engines * SLOTS)
        ids = itertools.count()
        self.system = System(
            rng=random.Random(0),
            wall_time=lambda: 1.7e9,
            new_id=lambda: str(next(ids)),
            log=NoLog(),
        )
        store = VersionStore.open(directory and directory / "versions.sqlite")
        self.ledger = GroupLedger.open(directory and directory / "ledger.sqlite")
        config = small_config(
            rollout={"group_size": GROUP_SIZE, "num_workers": num_engines},
            buffer={"batch_groups": self.batch_groups},
            trainer={"num_steps": 10**6},
        )
        self.registry = VersionRegistry.start(self.system, REGISTRY, store=store)
        self.buffer = BufferActor.start(
            self.system,
            RoleInfo("buffer", BUFFER, LIFE),
            config=config,
            prompts=[Prompt(f"p{i}", f"problem {i}") for i in range(1000)],
            ledger=self.ledger,
        )
        self.version = self.step = self.term = self.num_trained = 0
        self.batch: BatchReady | None = None
        self._rng = random.Random(1)
        self._due: list[tuple[float, str, int, int, str, int]] = []
        self._by_name = {engine.name: engine for engine in self.engines}
        self._rollouts: dict[int, tuple[Rollout, ...]] = {}

    async def join(self) -> float:
        """Let everyone register; return seconds."""
        self.meter.start()
        for fake in [self.trainer, *self.engines]:
            self.system.register(fake)  # type: ignore[arg-type]
            await self.registry.ask(RegisterRole(fake.role), block=False)
            self.mail.clear()
        acquired = await self.registry.ask(AcquireTerm(TRAINER, "trainer-0/0"), block=False)
        self.term = acquired.term
        await self._publish()
        await asyncio.sleep(1.0)
        return self.meter.stop()

    async def train(self) -> float:
        """Train until the groups are used up; return seconds."""
        self.mail.clear()
        for engine in self.engines:
            self._claim(engine)
        self.meter.start()
        self._request()
        while self.num_trained < self.num_groups:
            await asyncio.sleep(self._tick_s)
            self.meter.fake(self._tick)
            if self.batch is not None:
                await self._train(self.batch)
        return self.meter.stop()

    async def leave(self) -> float:
        """Let every engine die with what it holds; return seconds."""
        self.mail.clear()
        self.meter.start()
        for engine in self.engines:
            for watcher in engine.watchers:
                watcher.tell(Down(engine.name, "killed"))
            await asyncio.sleep(1e-3)
        return self.meter.stop()

    def _tick(self) -> None:
        now = asyncio.get_running_loop().time()
        while self.mail:
            fake, message = self.mail.popleft()
            if isinstance(message, PromptsClaimed):
                for each in message.assignments:
                    due = now + self._rng.uniform(*GROUP_S)
                    # atoms only: what a fake holds is nothing to the garbage collector
                    group = (fake.name, each.group_id, each.attempt, each.prompt.prompt_id)
                    heapq.heappush(self._due, (due, *group, each.epoch))
            elif isinstance(message, BatchReady):
                self.batch = message
        while self._due and self._due[0][0] <= now:
            _, name, *group = heapq.heappop(self._due)
            self._finish(self._by_name[name], *group)

    def _finish(
        self, engine: Engine, group_id: int, attempt: int, prompt_id: str, epoch: int
    ) -> None:
        rollouts = self._rollouts.get(self.version)
        if rollouts is None:
            rollouts = self._rollouts[self.version] = _rollouts(self.version)
        group = RolloutGroup(group_id, attempt, prompt_id, epoch, rollouts)
        engine.finished += 1
        incarnation = engine.role.incarnation
        stats = RolloutStats(engine.name, incarnation, finished_groups=engine.finished)
        self.buffer.tell(GroupFinished(engine.name, incarnation, group, stats))
        self._claim(engine)

    def _claim(self, engine: Engine) -> None:
        total = SLOTS + engine.finished
        self.buffer.tell(ClaimPrompts(engine.name, engine.role.incarnation, total, 0, LIFE))

    async def _train(self, ready: BatchReady) -> None:
        self.batch = None
        ids = tuple(group.group_id for group in ready.batch.groups)
        self.step += 1
        self.num_trained += len(ids)
        self.buffer.tell(StepTrained(self.term, ready.batch.step, ids, {}))
        await self._publish()
        self._request()

    def _request(self) -> None:
        self.buffer.tell(RequestBatch(TRAINER, self.term, self.version, self.step, None, LIFE))

    async def _publish(self) -> None:
        parent = self.version if self.step else None
        reserve = ReserveVersion(self.term, self.step, parent)
        self.version = (await self.registry.ask(reserve, block=False)).version
        commit = CommitVersion(self.term, self.version, f"digest {self.version}")
        await self.registry.ask(commit, block=False)


def _rollouts(version: int) -> tuple[Rollout, ...]:
    tokens = Packed.of(range(16), "int32")
    return tuple(
        Rollout(
            prompt_ids=tokens,
            completion_ids=tokens,
            behavior_logprobs=Packed.of([-1.0] * 16, "float32"),
            loss_mask=Packed("uint8", b"\x01" * 16),
            spans=(VersionSpan(version, 0, 16),),
            finish_reason="stop",
            reward=float(seed % 2),
            seed=seed,
        )
        for seed in range(GROUP_SIZE)
    )


class Cost(NamedTuple):
    """us of one size."""

    per_group: float
    per_join: float
    per_leave: float


def measure(num_engines: int, num_groups: int, on_disk: bool) -> Cost:
    async def main(directory: Path | None) -> Cost:
        run = Run(num_engines, num_groups, directory)
        joined = await run.join()
        trained = await run.train()
        left = await run.leave()
        return Cost(
            trained / run.num_trained * 1e6, joined / num_engines * 1e6, left / num_engines * 1e6
        )

    gc.collect()
    gc.freeze()
    if not on_disk:
        return run_virtual(main(None))
    with tempfile.TemporaryDirectory() as directory:
        return run_virtual(main(Path(directory)))


def memory(num_engines: int) -> tuple[float, int]:
    """Return (traced bytes at the peak, groups open then)."""

    async def main(directory: Path) -> tuple[float, int]:
        gc.collect()
        tracemalloc.start()
        run = Run(num_engines, 1, directory)  # one batch: by then all that may be open is
        await run.join()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        await run.train()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak - before, num_engines * SLOTS

    with tempfile.TemporaryDirectory() as directory:
        return run_virtual(main(Path(directory)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-memory", action="store_true")
    options = parser.parse_args()
    measure(10, 1_000, on_disk=False)  # what is loaded and cached once
    costs: dict[tuple[bool, int], list[Cost]] = {}
    for _ in range(options.rounds):  # interleaved: the machine is not always as fast
        for on_disk in (False, True):
            for size in options.sizes:
                cost = measure(size, SIZES[size], on_disk)
                costs.setdefault((on_disk, size), []).append(cost)
    print("us of CPU     engines    groups   per group   of 10's  per join  per leave")
    for on_disk in (False, True):
        first = costs[on_disk, options.sizes[0]]
        for size in options.sizes:
            here = costs[on_disk, size]
            # what shares the machine only adds: the least of all rounds, and ratios within a round
            least = [min(each) for each in zip(*here, strict=True)]
            pairs = zip(here, first, strict=True)
            ratio = statistics.median(a.per_group / b.per_group for a, b in pairs)
            print(
                f"{'file' if on_disk else 'memory':10} {size:10,} {SIZES[size]:9,}"
                f" {least[0]:11.1f} {ratio:9.2f} {least[1]:9.1f} {least[2]:10.1f}",
                flush=True,
            )
    if options.no_memory:
        return
    print("memory        engines      open     MB at peak   bytes per open group")
    for size in options.sizes:
        peak, num_open = memory(size)
        print(f"{'':10} {size:10,} {num_open:9,} {peak / 1e6:14.1f} {peak / num_open:12.0f}")


if __name__ == "__main__":
    main()
