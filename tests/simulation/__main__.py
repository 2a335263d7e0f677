# ruff: noqa: T201 - a command prints
"""`python -m tests.simulation SEED` replays a world; without a seed it runs many fresh ones.

python -m tests.simulation 1016                            one world, with its trace and faults
python -m tests.simulation --worlds 500                    so many fresh ones, failures shrunk
python -m tests.simulation --seconds 600 --jobs 2          as many as go into ten minutes
python -m tests.simulation 1055 --mutant engine_takes_any_term
python -m tests.simulation --find all                      a random world for each mutant
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import secrets
import subprocess
import sys
import time

import msgspec
from tests.simulation.coverage import Tally, report
from tests.simulation.draw import draw
from tests.simulation.mutants import MUTANTS, planted
from tests.simulation.simulate import bounded, commit, explain, run


def replay(seed: int, *, quiet: bool) -> int:
    """Run one world and print all of it."""
    plan = draw(seed)
    print(f"commit {commit()}")
    print(plan.config.to_toml())
    print(plan.delays, plan.links, f"num_prompts={plan.num_prompts}")
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


WORLD_S = 300.0
"""CPU seconds after which a world is one that never ends."""


def many(first: int, step: int, worlds: float, seconds: float, most: int) -> Tally:
    """Run every `step`-th world from `first` until one of the limits is reached."""
    tally, until, seed = Tally(), time.monotonic() + seconds, first
    while tally.worlds < worlds and time.monotonic() < until and tally.failed < most:
        with bounded(WORLD_S):
            outcome = run(draw(seed))
        tally.add(outcome)
        if outcome.problems:
            tally.failed += 1
            tally.failures.append(explain(outcome))
            print(tally.failures[-1], file=sys.stderr, flush=True)
        seed += step
    return tally


def spread(options: argparse.Namespace, first: int) -> Tally:
    """Run the same in several processes, each with its share of the seeds."""
    worlds = ["--worlds", str(math.ceil(options.worlds / options.jobs))] if options.worlds else []
    mutant = ["--mutant", options.mutant] if options.mutant else []
    commands = [
        [
            sys.executable, "-m", "tests.simulation", "--json", "--from", str(first + job),
            "--step", str(options.jobs), "--seconds", str(options.seconds),
            "--most", str(options.most), *worlds, *mutant,
        ]
        for job in range(options.jobs)
    ]  # fmt: skip
    processes = [subprocess.Popen(c, stdout=subprocess.PIPE) for c in commands]
    whole = Tally()
    for process in processes:
        output, _ = process.communicate()
        whole.merge(msgspec.json.decode(output, type=Tally))
    return whole


@functools.cache
def _is_fine(seed: int) -> bool:
    """Whether nothing breaks without a mutant."""
    return not run(draw(seed)).problems


def find(name: str, first: int, worlds: int) -> int | None:
    """Return the first seed whose world catches a mutant, and is fine without it."""
    for seed in range(first, first + worlds):
        with planted(name):
            caught = run(draw(seed)).problems
        if caught and _is_fine(seed):
            print(f"{name}: seed {seed}, {seed - first + 1} worlds, {caught[0]}", flush=True)
            return seed
    print(f"{name}: none of {worlds} worlds from seed {first}", flush=True)
    return None


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("seed", nargs="?", type=int, help="replay this world")
    parser.add_argument("--worlds", type=int, help="run so many worlds")
    parser.add_argument("--seconds", type=float, default=math.inf, help="run for so long")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--from", dest="first", type=int, help="first seed; random by default")
    parser.add_argument("--step", type=int, default=1, help="from one seed to the next")
    parser.add_argument("--most", type=int, default=20, help="stop after so many failures")
    parser.add_argument("--quiet", action="store_true", help="no trace")
    parser.add_argument("--json", action="store_true", help="the tally, for another process")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="with this fault put back")
    parser.add_argument("--find", help="a mutant, or all: the first random world that catches it")
    options = parser.parse_args()
    gc.freeze()  # torch is large, and nothing of it ends before the end
    if options.find is not None:
        drawn = sorted(name for name, each in MUTANTS.items() if each.world is None)
        names = drawn if options.find == "all" else [options.find]
        found = [find(name, options.first or 0, options.worlds or 300) for name in names]
        return 1 if None in found else 0
    if options.worlds is None and options.seconds == math.inf:
        options.worlds = 20
    first = options.first if options.first is not None else secrets.randbelow(10**9)
    with planted(options.mutant):
        if options.seed is not None:
            return replay(options.seed, quiet=options.quiet)
        started = time.monotonic()
        if options.jobs > 1:
            tally = spread(options, first)
        else:
            worlds = options.worlds or math.inf
            tally = many(first, options.step, worlds, options.seconds, options.most)
    if options.json:
        sys.stdout.buffer.write(msgspec.json.encode(tally))
    else:
        print(f"seeds from {first}, commit {commit()}")
        print("\n".join(report(tally, time.monotonic() - started)))
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
