"""Wall time per step: asynchronous training against the same work done strictly in order.

Both are this code (`trainer.synchronous`), the same recipe, machine and number of steps, run in
turns so that noise meets both alike.
Usage: python benchmarks/async_vs_sync.py [RECIPE] [STEPS] [ROUNDS]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from ratchet import Run
from ratchet.observability.metrics import read_metrics

SKIPPED = 10
"""Steps at the start that are not counted: caches and buffers fill."""


def seconds_per_step(recipe: str, steps: int, *, synchronous: bool) -> tuple[float, float, float]:
    """Train; return seconds per step, and the mean busy shares of trainer and engines."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"trainer.num_steps={steps}",
            f"trainer.synchronous={str(synchronous).lower()}",
            "eval.num_prompts=0",
        ]
        run = Run(recipe, directory=Path(folder) / "run", overrides=overrides)
        run.start().wait()
        lines = read_metrics(run.directory.metrics)[SKIPPED:]
    elapsed = lines[-1]["time_s"] - lines[0]["time_s"]
    return (
        elapsed / (len(lines) - 1),
        statistics.fmean(line["trainer_busy_share"] for line in lines),
        statistics.fmean(line["rollout_busy_share"] for line in lines),
    )


def main() -> None:
    recipe = sys.argv[1] if len(sys.argv) > 1 else "recipes/copy.toml"
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 80
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 3
    results: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
    for _ in range(rounds):
        for synchronous in (True, False):
            results[synchronous].append(seconds_per_step(recipe, steps, synchronous=synchronous))
    print(f"{recipe}, {steps} steps, medians of {rounds} rounds in turns")
    print(f"{'mode':12}  s/step  trainer busy  engines busy  each round")
    for synchronous, rows in results.items():
        name = "synchronous" if synchronous else "asynchronous"
        seconds, trainer, engines = (
            statistics.median(column) for column in zip(*rows, strict=True)
        )
        each = ", ".join(f"{row[0]:.3f}" for row in rows)
        print(f"{name:12}  {seconds:6.3f}  {trainer:12.0%}  {engines:12.0%}  {each}")
    ratio = statistics.median(
        slow[0] / fast[0] for slow, fast in zip(results[True], results[False], strict=True)
    )
    print(f"speed-up: {ratio:.2f}")


if __name__ == "__main__":
    main()
