"""kill -9 of the processes of a run, one after the other at seeded moments: does it go on, what
does it cost, and does the run directory still add up at its end?

    python -m benchmarks.chaos [--kills 20] [--seed 1] [--roles buffer rollout ...] [--every 3]

Every `--every` steps one kill hits a target that the seed draws, at a moment that it draws too:

    trainer-step        between two lines of metrics: waiting, forward, backward, optimiser
    trainer-transfer    while a version is reserved and not committed: engines load it
    trainer-checkpoint  while a checkpoint is unfinished
    registry            at any time; registry-commit: between reserve and commit of a version
    buffer, rollout     at any time; of the two rollout workers, the seed draws one
    launcher            at any time; all must go with it, and `ratchet resume` goes on

Moments are found from outside, in the files of the run. The seed fixes who dies when; how far the
processes are by then is the machine's. After the run it checks the directory with `ratchet audit`
and with questions in SQL of its own; what does not hold, or no step within `--patience` seconds, is
printed with the seed, and the directory stays. Prints:

* steps committed over steps attempted: lines of metrics that stayed over all lines, those a later
  life took back included; and over all batches that were handed out, those of a step that died
  before its line included;
* per target: kills, those that came before the moment was over, and seconds from a kill to the
  next step that stayed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from benchmarks.chaos_check import BATCH_GROUPS, ViolationError, ask, check
from tests.helpers.command import gone, json_lines
from tests.helpers.config import small_config

from ratchet.config import Config
from ratchet.observability.metrics import MetricsReader, read_metrics
from ratchet.observability.rundir import RunDirectory

TARGETS = (
    "trainer-step",
    "trainer-transfer",
    "trainer-checkpoint",
    "registry",
    "registry-commit",
    "buffer",
    "rollout",
    "launcher",
)
NUM_WORKERS = 2
_PROCESS = {"trainer": "trainer-0", "registry": "registry", "buffer": "buffer"}


class _OverError(Exception):
    """The run has ended in order."""


@dataclass(frozen=True)
class Plan:
    """What to do to a run; all of it follows from the seed."""

    num_kills: int
    seed: int
    targets: Sequence[str] = TARGETS
    every: int = 3
    """steps from one kill to the next"""
    checkpoint_steps: int = 2
    group_size: int = 4
    """the more, the longer a step"""
    patience_s: float = 120.0

    def kills(self) -> list[tuple[str, float, int]]:
        """Return target, moment (0 to 1, of an ordinary step) and worker of each kill."""
        draw = random.Random(self.seed)
        return [
            (draw.choice(self.targets), draw.random(), draw.randrange(NUM_WORKERS))
            for _ in range(self.num_kills)
        ]

    def config(self) -> Config:
        """Return a copy job with steps for all kills, unless steps are much shorter than the pause
        in which a victim starts again.
        """
        num_steps = (self.num_kills + 1) * (self.every + 2)
        return small_config(
            task={"name": "copy", "args": {"digits": 3, "num_prompts": 40, "holdout": 14}},
            rollout={"max_tokens": 5, "group_size": self.group_size, "num_workers": NUM_WORKERS},
            buffer={"batch_groups": BATCH_GROUPS},
            trainer={"num_steps": num_steps, "lr": 1e-3},
            checkpoint={"every_steps": self.checkpoint_steps, "keep": 2},
            runtime={"max_restarts": 10 * self.num_kills},
        )


@dataclass(frozen=True)
class Kill:
    """One kill that was made."""

    target: str
    at: float
    step: int
    """the newest line of metrics then"""
    hit: bool
    """whether the moment was not over: the version is still reserved, the checkpoint unfinished"""


@dataclass
class Outcome:
    """What became of a run."""

    kills: list[Kill] = field(default_factory=list)
    stayed: dict[int, float] = field(default_factory=dict)
    """when the line of each step came for the last time"""
    took_s: float = 0.0

    def recovery_s(self, kill: Kill) -> float:
        """Return the seconds from a kill to the next step that stayed."""
        return min(at for at in self.stayed.values() if at > kill.at) - kill.at


class Chaos:
    """A run in processes, and who kills them."""

    def __init__(self, plan: Plan, root: Path) -> None:
        self.plan, self.root, self.run = plan, root, RunDirectory(root)
        self.outcome = Outcome()
        self._metrics = MetricsReader(self.run.metrics)
        self._ordinary_s = 0.3
        self._output = root.with_suffix(".out")
        self._sockets = root.with_suffix(".tmp")  # a launcher that is killed leaves its own
        self._dead: set[int] = set()
        self._last: tuple[int, float] = (0, time.monotonic())
        self._moments = {
            "transfer": self._is_reserved,
            "commit": self._is_reserved,
            "checkpoint": self._is_unfinished,
        }

    def play(self) -> Outcome:
        """Run to the end.

        Raises:
            ViolationError: if the run ends early, fails, or stands still.
        """
        recipe = self.root.with_suffix(".toml")
        recipe.write_text(self.plan.config().to_toml())
        self._sockets.mkdir()
        started = time.monotonic()
        self._launch("run", str(recipe), "--dir", str(self.root))
        try:
            with suppress(_OverError):
                for target, moment, worker in self.plan.kills():
                    due = self._last[0] + self.plan.every
                    self._until(lambda due=due: self._last[0] >= due)
                    self._kill(target, moment, worker)
                self._until(lambda: False)
        finally:
            self._end()
        self.outcome.took_s = time.monotonic() - started
        return self.outcome

    def _launch(self, *arguments: str) -> None:
        with self._output.open("ab") as output:
            self._launcher = subprocess.Popen(
                [sys.executable, "-m", "ratchet.cli", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(self._sockets)},
            )

    def _look(self) -> None:
        """Note the lines of metrics that have come."""
        now = time.monotonic()
        for line in self._metrics.new():
            self.outcome.stayed[line["step"]] = now
            self._last = line["step"], now
        if now - self._last[1] > self.plan.patience_s:
            raise ViolationError(f"no step after {self._last[0]} for {self.plan.patience_s} s")

    def _until(self, happened: Callable[[], Any], pause_s: float = 0.02) -> Any:
        while not (found := happened()):
            code = self._launcher.poll()
            self._look()
            if code == 0:
                raise _OverError
            if code is not None:
                raise ViolationError(f"the run failed:\n{self._output.read_text()[-2000:]}")
            time.sleep(pause_s)
        return found

    def _kill(self, target: str, moment: float, worker: int) -> None:
        kind, _, when = target.partition("-")
        name = _PROCESS.get(kind, f"rollout-{worker}")
        victim = self._launcher.pid if kind == "launcher" else 0
        if not victim:
            victim = self._until(lambda: self._living(name))
        is_moment = self._moments.get(when)
        if is_moment is None:
            time.sleep(moment * self._ordinary_s)
        else:
            self._until(is_moment, 0.001)
        family = psutil.Process(victim).children(recursive=True) if kind == "launcher" else []
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            raise ViolationError(
                f"{name}, process {victim}, had gone before it was killed"
            ) from None
        hit = is_moment is None or is_moment()
        self._dead.add(victim)
        self._look()  # what was written before
        self.outcome.kills.append(Kill(target, time.monotonic(), self._last[0], hit))
        if kind == "launcher":
            self._launcher.wait()
            if left := gone(family, 20.0):
                raise ViolationError(f"outlived their launcher: {left}")
            self._launch("resume", str(self.root))

    def _living(self, name: str) -> int:
        lines = json_lines(self.run.logs / "launcher-0.jsonl")
        started = [
            line["pid"]
            for line in lines
            if line["event"] == "process_started" and line["name"] == name
        ]
        pid = started[-1] if started else 0
        return 0 if pid in self._dead or not psutil.pid_exists(pid) else pid

    def _is_reserved(self) -> bool:
        query = "SELECT count(*) FROM versions WHERE state = 'reserved'"
        return bool(ask(self.run.versions, query)[0][0])

    def _is_unfinished(self) -> bool:
        return any(self.run.checkpoints.glob(".unfinished-*"))

    def _end(self) -> None:
        if self._launcher.poll() is None:
            self._launcher.kill()
            self._launcher.wait()


def report(root: Path, outcome: Outcome) -> str:
    """Return the numbers as text."""
    run = RunDirectory(root)
    stayed = len(read_metrics(run.metrics))
    lost = len(read_metrics(run.metrics.with_name("metrics.lost.jsonl")))
    batched = ask(run.ledger, "SELECT count(*) FROM events WHERE event = 'batched'")[0][0]
    batches = batched / BATCH_GROUPS
    lines = [
        f"{len(outcome.kills)} kills, {stayed} steps in {outcome.took_s:.0f} s",
        f"committed over attempted: {stayed / (stayed + lost):.1%} of the lines of metrics,"
        f" {stayed / batches:.1%} of {batches:.0f} batches",
        "target              kills   hit  median s    p90 s    max s",
    ]
    for target in TARGETS:
        kills = [kill for kill in outcome.kills if kill.target == target]
        if not kills:
            continue
        times = sorted(map(outcome.recovery_s, kills))
        p90 = times[min(len(times) - 1, int(0.9 * len(times)))]
        lines.append(
            f"{target:18s}  {len(times):5d} {sum(kill.hit for kill in kills):5d}"
            f"  {statistics.median(times):8.1f} {p90:8.1f} {times[-1]:8.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Play, check, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", dest="num_kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--roles", dest="targets", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--checkpoint-steps", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--patience", dest="patience_s", type=float, default=120.0)
    plan = Plan(**vars(parser.parse_args()))
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    chaos = Chaos(plan, folder / "run")
    try:
        outcome = chaos.play()
        check(chaos.root, plan.config().trainer.num_steps)
    except BaseException as error:
        made = ", ".join(f"{kill.target} at {kill.step}" for kill in chaos.outcome.kills)
        print(f"seed {plan.seed}, after {made}; the run is in {chaos.root}: {error}")
        raise SystemExit(1) from error
    print(report(chaos.root, outcome))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
