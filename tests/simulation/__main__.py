# ruff: noqa: T201 - a command prints
"""`python -m tests.simulation SEED` replays a world; `--worlds N [--from SEED]` runs many."""

from __future__ import annotations

import argparse
import itertools
import secrets
import sys
import time
from collections import Counter

from tests.simulation.draw import draw
from tests.simulation.mutants import MUTANTS, planted
from tests.simulation.simulate import explain, run


def replay(seed: int, *, quiet: bool) -> int:
    """Run one world and print all of it."""
    plan = draw(seed)
    print(plan.config.to_toml())
    print(plan.delays, f"num_prompts={plan.num_prompts}")
    for fault in plan.faults:
        print("fault:", fault)
    outcome = run(plan)
    if not quiet:
        for at, sender, receiver, what in outcome.trace:
            print(f"{at:12.6f}  {sender:>10} -> {receiver:<10}  {what}")
        for name, events in outcome.logs.items():
            for level, event, fields in events:
                if level in {"warning", "error"}:
                    print(f"{name}: {level} {event} {fields}")
    print(f"{outcome.status} after {outcome.steps} steps, {outcome.virtual_s:.1f} virtual s")
    for leak in outcome.leaks:
        print("leak:", leak)
    for problem in outcome.problems:
        print("BROKEN", problem)
    return 1 if outcome.problems else 0


def many(first: int, count: int, *, most: int) -> int:
    """Run worlds and print a summary with what they covered."""
    statuses: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    pairs: Counter[tuple[str, ...]] = Counter()
    messages: Counter[str] = Counter()
    leaks: Counter[str] = Counter()
    failed, virtual_s, started = 0, 0.0, time.monotonic()
    for seed in range(first, first + count):
        outcome = run(draw(seed))
        statuses[outcome.status] += 1
        virtual_s += outcome.virtual_s
        kinds.update(fault.kind for fault in outcome.plan.faults)
        pairs.update(itertools.combinations(sorted(outcome.kinds), 2))
        messages.update(outcome.messages)
        leaks.update(outcome.leaks)
        if outcome.problems:
            failed += 1
            print(explain(outcome), flush=True)
            if failed >= most:
                count = seed - first + 1
                break
    print(f"{count} worlds from seed {first}: {failed} failed; {dict(statuses)}")
    print(f"{virtual_s / 3600:.1f} virtual hours in {time.monotonic() - started:.0f} s")
    print(f"{kinds.total()} faults: {dict(kinds.most_common())}")
    print(f"{len(pairs)} pairs of kinds, least often: {pairs.most_common()[-3:]}")
    print(f"messages: {dict(messages.most_common())}")
    print(f"leaks: {dict(leaks)}")
    return 1 if failed else 0


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", nargs="?", type=int, help="replay this world")
    parser.add_argument("--worlds", type=int, help="run so many worlds")
    parser.add_argument("--from", dest="first", type=int, help="first seed; random by default")
    parser.add_argument("--most", type=int, default=20, help="stop after so many failures")
    parser.add_argument("--quiet", action="store_true", help="no trace")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="with this fault put back")
    options = parser.parse_args()
    with planted(options.mutant):
        if options.seed is not None:
            return replay(options.seed, quiet=options.quiet)
        first = options.first if options.first is not None else secrets.randbelow(10**9)
        return many(first, options.worlds or 20, most=options.most)


if __name__ == "__main__":
    sys.exit(main())
