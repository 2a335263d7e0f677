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
processes are by then is the machine's. At last the launcher dies once more, not counted, and the
run is resumed to an end that is near. Then it checks the directory with `ratchet audit`
and with questions in SQL of its own; what does not hold, or no step within `--patience` seconds, is
printed with the seed, and the directory stays. Prints:

* steps committed over steps attempted: lines of metrics that stayed over all lines, those a later
  life took back included; and over all batches that were handed out, those of a step that died
  before its line included;
* per target: kills, those that came before the moment was over, and seconds from a kill to the
  next step that stayed, which may have been in hand then, and to the one after it, which was not.

A reward that takes its time (`--reward-s`) makes steps long without a core, so that a worker that
was killed is back before its next turn. One rollout kill per step, and one trainer kill per ten:

    python -m benchmarks.chaos --kills 20 --seed 3 --every 1 --roles rollout --reward-s 4
    python -m benchmarks.chaos --kills 10 --seed 4 --every 10 --roles trainer-step --reward-s 1 \\
        --checkpoint-steps 1

A trainer's kill costs the batch in hand, one of eleven, so about 91% of them are the most there is;
it costs lines of metrics only where the checkpoint of the newest one was not whole yet.

Seen on 2 cores, nothing lost or doubled in what ended. Load 3 to 6, steps of 0.1 s: 30 kills of all
targets; 46 of registry, buffer and rollouts; 100 of rollouts; 18 of trainers (one per ten steps, a
checkpoint each step): 97% of the lines, 89 to 92% of the batches; 40 with seed 9 and `--every 2
--roles registry registry-commit buffer`: 98% of 102 batches, the next step at most 1.9 s away (58 s
once, before a restarted buffer was told at once what it has to know). Load 1 to 4: the two lines
above, 20 rollout kills, one per step of 7.7 s: 100% of 24 batches, the next step after 3.5 s by the
median, 6.9 s at most; 10 trainer kills, one per ten steps: 100% of the lines, 91.7% of 120 batches,
the next step after 4.1 s, 6.4 s at most.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from benchmarks.chaos_check import ViolationError, ask, check, started
from benchmarks.chaos_plan import BATCH_GROUPS, TARGETS, Kill, Outcome, Plan
from benchmarks.chaos_reward import COMPLETION_S
from tests.helpers.command import gone

from ratchet.observability.metrics import MetricsReader, read_metrics
from ratchet.observability.rundir import RunDirectory

_PROCESS = {"trainer": "trainer-0"} | {n: n for n in ("registry", "buffer", "launcher")}


class Chaos:
    """A run in processes, and who kills them."""

    def __init__(self, plan: Plan, root: Path) -> None:
        self.plan, self.root, self.run = plan, root, RunDirectory(root)
        self.outcome = Outcome()
        self._metrics = MetricsReader(self.run.metrics)
        self._step_s: deque[float] = deque([0.3], maxlen=9)
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
        began = time.monotonic()
        self._launch("run", str(recipe), "--dir", str(self.root))
        try:
            for target, moment, worker in self.plan.kills():
                self._steps(self.plan.every)
                self._kill(target, moment, worker)
            self._steps(self.plan.every)
            self._count()
            self._finish()
        finally:
            self._end()
        self.outcome.took_s = self.outcome.kills[-1].at - began
        return self.outcome

    def _launch(self, *arguments: str) -> None:
        with self._output.open("ab") as output:
            self._launcher = subprocess.Popen(
                [sys.executable, "-m", "ratchet.cli", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "TMPDIR": str(self._sockets),
                    COMPLETION_S: str(self.plan.reward_s / self.plan.group_size),
                },
            )

    def _look(self) -> None:
        """Note the lines of metrics that have come."""
        now = time.monotonic()
        for line in self._metrics.new():
            self.outcome.stayed[line["step"]] = now
            self._step_s.append(line["step_s"])
            self._last = line["step"], now
        if now - self._last[1] > self.plan.patience_s:
            raise ViolationError(f"no step after {self._last[0]} for {self.plan.patience_s} s")

    def _until(self, happened: Callable[[], Any], pause_s: float = 0.02) -> Any:
        while not (found := happened()):
            code = self._launcher.poll()
            self._look()
            if code is not None:
                raise ViolationError(
                    f"the run ended with {code}:\n{self._output.read_text()[-2000:]}"
                )
            time.sleep(pause_s)
        return found

    def _kill(self, target: str, moment: float, worker: int) -> None:
        kind, _, when = target.partition("-")
        name = f"rollout-{worker}" if kind == "rollout" else _PROCESS[kind]
        victim = self._until(lambda: self._living(name))
        is_moment = self._moments.get(when)
        if is_moment is None:
            time.sleep(moment * statistics.median(self._step_s))
        else:
            self._until(is_moment, 0.001)
        family = psutil.Process(victim).children(recursive=True) if kind == "launcher" else []
        with suppress(ProcessLookupError):  # the run has just ended
            os.kill(victim, signal.SIGKILL)
        hit = is_moment is None or is_moment()
        self._dead.add(victim)
        self._look()  # what was written before
        self.outcome.kills.append(Kill(target, name, time.monotonic(), self._last[0], hit))
        if kind == "launcher":
            self._resume(family)

    def _resume(self, family: list[psutil.Process], *arguments: str) -> None:
        self._launcher.wait()
        if left := gone(family, 20.0):
            raise ViolationError(f"outlived their launcher: {left}")
        self._launch("resume", str(self.root), *arguments)

    def _steps(self, num_steps: int) -> None:
        due = self._last[0] + num_steps
        self._until(lambda: self._last[0] >= due)

    def _count(self) -> None:
        outcome, run = self.outcome, self.run
        outcome.num_lines = len(read_metrics(run.metrics))
        outcome.num_lost = len(read_metrics(run.metrics.with_name("metrics.lost.jsonl")))
        query = "SELECT count(*) FROM events WHERE event = 'batched'"
        outcome.num_batches = ask(run.ledger, query)[0][0] // BATCH_GROUPS

    def _finish(self) -> None:
        """Kill the launcher once more, and go on to an end that is near."""
        family = psutil.Process(self._launcher.pid).children(recursive=True)
        self._launcher.kill()
        self._look()
        self.outcome.kills.append(Kill("end", "launcher", time.monotonic(), self._last[0], True))
        self.outcome.num_steps = self._last[0] + self.plan.every
        self._resume(family, "--set", f"trainer.num_steps={self.outcome.num_steps}")
        while (code := self._launcher.poll()) is None:
            self._look()
            time.sleep(0.02)
        if code:
            raise ViolationError(f"the run ended with {code}:\n{self._output.read_text()[-2000:]}")

    def _living(self, name: str) -> int:
        if name == "launcher":
            return self._launcher.pid
        pid = next(reversed(started(self.run, name)), 0)
        with suppress(psutil.NoSuchProcess):
            if pid not in self._dead and psutil.Process(pid).ppid() == self._launcher.pid:
                return pid
        return 0

    def _is_reserved(self) -> bool:
        query = "SELECT count(*) FROM versions WHERE state = 'reserved'"
        return bool(ask(self.run.versions, query)[0][0])

    def _is_unfinished(self) -> bool:
        return any(self.run.checkpoints.glob(".unfinished-*"))

    def _end(self) -> None:
        if self._launcher.poll() is None:
            self._launcher.kill()
            self._launcher.wait()


def report(outcome: Outcome) -> str:
    """Return the numbers as text."""
    stayed, lost = outcome.num_lines, outcome.num_lost
    lines = [
        f"{len(outcome.kills) - 1} kills, {stayed} steps in {outcome.took_s:.0f} s,"
        f" of {outcome.took_s / stayed:.1f} s each",
        f"committed over attempted: {stayed / (stayed + lost):.1%} of the lines of metrics,"
        f" {stayed / outcome.num_batches:.1%} of {outcome.num_batches} batches",
        "                                 next step, s            the one after it, s",
        "target              kills   hit    median    p90    max    median    p90    max",
    ]
    for target in TARGETS:
        kills = [kill for kill in outcome.kills if kill.target == target]
        if not kills:
            continue
        cells = [f"{target:18s}  {len(kills):5d} {sum(kill.hit for kill in kills):5d}"]
        for nth in (0, 1):
            times = sorted(outcome.next_s(kill, nth) for kill in kills)
            p90 = times[min(len(times) - 1, int(0.9 * len(times)))]
            cells.append(f"{statistics.median(times):8.1f} {p90:6.1f} {times[-1]:6.1f}")
        lines.append("  ".join(cells))
    return "\n".join(lines)


def main() -> None:
    """Play, check, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", dest="num_kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--roles", dest="targets", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--checkpoint-steps", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--reward-s", type=float, default=0.0)
    parser.add_argument("--patience", dest="patience_s", type=float, default=120.0)
    plan = Plan(**vars(parser.parse_args()))
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    chaos = Chaos(plan, folder / "run")
    try:
        outcome = chaos.play()
        check(chaos.root, outcome)
    except BaseException as error:
        made = ", ".join(f"{kill.target} at {kill.step}" for kill in chaos.outcome.kills)
        print(f"seed {plan.seed}, after {made}; the run is in {chaos.root}: {error}")
        raise SystemExit(1) from error
    print(report(outcome))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
