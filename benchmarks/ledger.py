"""What the ledgers and logs cost: `python benchmarks/ledger.py`.

Prints the median of several rounds, wall clock and CPU: us per transition of the group ledger (with
a flush for each, and per burst), ms per payload and per durable version number, us per log event
written and read.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from structlog.contextvars import bound_contextvars

from ratchet.observability.follow import read_logs
from ratchet.observability.logs import configure_logging
from ratchet.storage.ledger import GroupLedger
from ratchet.storage.payloads import Payloads
from ratchet.storage.versions import VersionStore
from ratchet.types import Packed, Rollout, RolloutGroup

ROUNDS = 5
GROUPS = 2_000
BATCH = 8
TRANSITIONS = 5 * GROUPS  # issue, claim, finish, batch, train


class Cost(NamedTuple):
    """Seconds for one of what is measured."""

    wall: float
    cpu: float


Measure = Callable[[Path], Cost]


class Watch:
    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def cost(self, count: int) -> Cost:
        cpu, wall = time.process_time() - self._cpu, time.perf_counter() - self._wall
        return Cost(wall / count, cpu / count)


def life_of_groups(ledger: GroupLedger, burst: int) -> None:
    """Every group goes its way; one flush per `burst` groups and transition."""
    for first in range(0, GROUPS, burst):
        ids = [ledger.issue(f"prompt-{first + i}", 0, 1.0) for i in range(burst)]
        ledger.save_cursor(0, first + burst)
        ledger.flush()
        for group_id in ids:
            ledger.claim(group_id, 0, "rollout-0", 2.0)
        ledger.flush()
        for group_id in ids:
            ledger.finish(
                group_id,
                0,
                min_version=1,
                max_version=2,
                reward_mean=0.5,
                reward_std=0.5,
                num_tokens=512,
                num_rollouts=8,
                now=3.0,
            )
        ledger.flush()
        ledger.batch(ids, first, dict.fromkeys(ids, 1), 4.0)
        ledger.flush()
        ledger.train(ids, first, 2, 5.0)
        ledger.flush()


def median(measure: Measure, scale: float, unit: str, name: str) -> None:
    costs = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as directory:
            costs.append(measure(Path(directory)))
    walls = [cost.wall * scale for cost in costs]
    cpu = statistics.median(cost.cpu * scale for cost in costs)
    spread = f"({min(walls):.2f} to {max(walls):.2f})"
    print(f"{name:44s} {statistics.median(walls):8.2f} {unit} {spread:22s} cpu {cpu:8.2f} {unit}")


def ledger_cost(burst: int) -> Measure:
    def measure(directory: Path) -> Cost:
        ledger = GroupLedger.open(directory / "ledger.sqlite")
        watch = Watch()
        life_of_groups(ledger, burst)
        cost = watch.cost(TRANSITIONS)
        ledger.close()
        return cost

    return measure


def counts_cost(directory: Path) -> Cost:
    ledger = GroupLedger.open(directory / "ledger.sqlite")
    life_of_groups(ledger, BATCH)
    watch = Watch()
    ledger.counts()
    return watch.cost(1)


def payload_cost(num_bytes: int, number: int) -> Measure:
    """Groups of 8 rollouts that are kept, to the last one on disk, and forgotten."""
    part = Packed("uint8", bytes(num_bytes // 8))
    none = Packed("uint8", b"")
    rollout = Rollout(part, none, none, none, (), "stop", 0.0, 0)

    def measure(directory: Path) -> Cost:
        payloads = Payloads(directory / "payloads")
        watch = Watch()
        for group_id in range(number):
            payloads.put(RolloutGroup(group_id, 0, "p", 0, (rollout,) * 8), num_bytes)
        payloads.close()
        cost = watch.cost(number)
        assert not payloads.num_failed, payloads.error
        return cost

    return measure


def open_cost(directory: Path) -> Cost:
    path = directory / "ledger.sqlite"
    ledger = GroupLedger.open(path)
    for _ in range(50):
        life_of_groups(ledger, GROUPS)
    ledger.close()
    watch = Watch()
    ledger = GroupLedger.open(path)
    cost = watch.cost(1)
    ledger.close()
    return cost


def reserve_cost(directory: Path) -> Cost:
    store = VersionStore.open(directory / "versions.sqlite")
    term = store.acquire_term("trainer-0", "a", 0.0)
    watch = Watch()
    for step in range(50):
        store.reserve(term, step, None, 0.0)
    cost = watch.cost(50)
    store.close()
    return cost


def log_cost(level: str) -> Measure:
    def measure(directory: Path) -> Cost:
        log = configure_logging(directory / "a-0.jsonl", role="a", run="r")
        write = getattr(log, level)
        with bound_contextvars(trace_id="0123456789abcdef", version=3):
            watch = Watch()
            for n in range(20_000):
                write("group_finished", group=n, worker="rollout-0", reward=0.5)
            return watch.cost(20_000)

    return measure


def read_cost(directory: Path) -> Cost:
    for rank in range(4):
        log = configure_logging(directory / f"rollout-{rank}.jsonl", role="rollout", run="r")
        for n in range(5_000):
            log.info("group_finished", group=n, worker="rollout-0", reward=0.5)
    watch = Watch()
    count = sum(1 for _ in read_logs(directory))
    return watch.cost(count)


def main() -> None:
    median(ledger_cost(1), 1e6, "us", "ledger transition, a flush for each")
    median(ledger_cost(BATCH), 1e6, "us", f"ledger transition, a flush per {BATCH}")
    median(
        ledger_cost(64 if GROUPS % 64 == 0 else 50), 1e6, "us", "ledger transition, a flush per 50"
    )
    median(counts_cost, 1e6, "us", f"ledger counts, {GROUPS} groups")
    median(open_cost, 1e3, "ms", f"ledger opened and checked, {50 * GROUPS} groups")
    for num_bytes, number in ((1_000, 1_000), (100_000, 200), (10_000_000, 20)):
        median(payload_cost(num_bytes, number), 1e3, "ms", f"payload of {num_bytes} bytes, kept")
    median(reserve_cost, 1e3, "ms", "version number, on disk")
    median(log_cost("info"), 1e6, "us", "log event")
    median(log_cost("debug"), 1e6, "us", "log event below the level")
    median(read_cost, 1e6, "us", "log line read and merged, 4 files of 5,000")


if __name__ == "__main__":
    main()
