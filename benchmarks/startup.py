"""How long a user waits: `import ratchet`, `ratchet --help`, and the first step of a recipe.

Medians of five; the first step once. Usage: python benchmarks/startup.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ratchet import Run

ROUNDS = 5


def seconds(*command: str) -> float:
    """Median wall time of a command."""
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def first_step() -> float:
    """Seconds from the start of a run to its first line of metrics."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        with Run("recipes/copy.toml", directory=Path(folder) / "run") as run:
            next(iter(run))
            took = time.perf_counter() - started
            run.stop(now=True)
    return took


def main() -> None:
    bare = seconds("-c", "pass")
    print(f"python -c pass      {bare * 1e3:6.0f} ms")
    print(f"import ratchet      {(seconds('-c', 'import ratchet') - bare) * 1e3:6.0f} ms more")
    print(f"ratchet --help      {seconds('-m', 'ratchet.cli', '--help') * 1e3:6.0f} ms")
    print(f"first step of copy  {first_step():6.1f} s")


if __name__ == "__main__":
    main()
