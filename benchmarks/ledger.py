"""What the ledgers and logs cost: `python benchmarks/ledger.py`.

Prints the median of several rounds: us per transition of the group ledger (in memory of the
process, and flushed to a file per burst), ms per durable version number, us per log event.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ratchet.storage.ledger import GroupLedger
from ratchet.storage.versions import VersionStore

ROUNDS = 5
GROUPS = 2_000
BATCH = 8
TRANSITIONS = 5 * GROUPS  # issue, claim, finish, batch, train


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


def median(measure: Callable[[Path], float], scale: float, unit: str, name: str) -> None:
    values = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as directory:
            values.append(measure(Path(directory)) * scale)
    low, high = min(values), max(values)
    print(f"{name:58s} {statistics.median(values):9.2f} {unit}  ({low:.2f} to {high:.2f})")


def ledger_cost(burst: int) -> Callable[[Path], float]:
    def measure(directory: Path) -> float:
        ledger = GroupLedger.open(directory / "ledger.sqlite")
        start = time.perf_counter()
        life_of_groups(ledger, burst)
        seconds = time.perf_counter() - start
        ledger.close()
        return seconds / TRANSITIONS

    return measure


def counts_cost(directory: Path) -> float:
    ledger = GroupLedger.open(directory / "ledger.sqlite")
    life_of_groups(ledger, BATCH)
    start = time.perf_counter()
    ledger.counts()
    return time.perf_counter() - start


def reserve_cost(directory: Path) -> float:
    store = VersionStore.open(directory / "versions.sqlite")
    term = store.acquire_term("trainer-0", "a", 0.0)
    start = time.perf_counter()
    for step in range(50):
        store.reserve(term, step, None, 0.0)
    seconds = time.perf_counter() - start
    store.close()
    return seconds / 50


def main() -> None:
    median(ledger_cost(1), 1e6, "us", "ledger transition, a flush for each")
    median(ledger_cost(BATCH), 1e6, "us", f"ledger transition, a flush per {BATCH}")
    median(
        ledger_cost(64 if GROUPS % 64 == 0 else 50), 1e6, "us", "ledger transition, a flush per 50"
    )
    median(counts_cost, 1e6, "us", f"ledger counts, {GROUPS} groups")
    median(reserve_cost, 1e3, "ms", "version number, on disk")


if __name__ == "__main__":
    main()
