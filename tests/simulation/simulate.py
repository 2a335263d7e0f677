"""Runs a plan to its end and says which invariants broke; shrinks the list of faults of a bad one.

A world ends when its newest trainer has ended, when an invariant breaks, or at `LIMIT_S` virtual
seconds. One process runs one world at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.simulation import supervision
from tests.simulation.disk import Disk, a_disk
from tests.simulation.invariants import Watch
from tests.simulation.launcher import KILLED
from tests.simulation.loop import Deadlock, run_virtual
from tests.simulation.trainers import WorldCheckpoints
from tests.simulation.world import World

from ratchet.actors.role import BUFFER, REGISTRY

if TYPE_CHECKING:
    from tests.simulation.plan import Plan

LIMIT_S = 1e6

_STATE_AFTER = {
    "issued": "issued", "retried": "issued", "claimed": "claimed", "finished": "finished",
    "masked": "masked", "batched": "batched", "trained": "trained", "dropped": "dropped",
    "committed": "committed", "requeued": "finished",
}  # fmt: skip


@dataclass
class Outcome:
    """What became of a world."""

    plan: Plan
    problems: list[str] = field(default_factory=list)
    status: str = "crashed"
    steps: int = 0
    virtual_s: float = 0.0
    trace: list[tuple[float, str, str, str]] = field(default_factory=list)
    logs: dict[str, list[Any]] = field(default_factory=dict)
    leaks: list[str] = field(default_factory=list)
    states: Counter[str] = field(default_factory=Counter)
    """states that groups have been in"""

    @property
    def kinds(self) -> set[str]:
        """Kinds of faults in the plan."""
        return {fault.kind for fault in self.plan.faults}


class TooLong(KeyboardInterrupt):
    """A world goes round in circles. Of this kind, as nothing else gets out of any callback."""


@contextlib.contextmanager
def bounded(cpu_s: float) -> Iterator[None]:
    """End the worlds of this block with `TooLong` once they have taken so much CPU time."""

    def end(*_: object) -> None:
        raise TooLong(f"the world took more than {cpu_s:g} CPU seconds")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def run(plan: Plan) -> Outcome:
    """Run one world."""
    outcome = Outcome(plan)
    worlds: list[World] = []
    try:
        with contextlib.ExitStack() as stack:
            disk = stack.enter_context(a_disk(plan.seed)) if plan.on_disk else None
            checkpoints = stack.enter_context(a_store(plan))
            run_virtual(_live(plan, outcome, worlds, disk, checkpoints), seed=plan.seed)
    except Deadlock as error:
        outcome.problems.append(f"I6: {error}")
    except (TooLong, Exception) as error:  # noqa: BLE001 - whatever a world does, it is reported
        outcome.problems.append(f"crash: {type(error).__name__}: {error}")
    for world in worlds:
        outcome.trace = world.network.trace
        outcome.logs = {name: log.events for name, log in world.logs.items()}
    return outcome


@contextlib.contextmanager
def a_store(plan: Plan) -> Iterator[WorldCheckpoints | None]:
    """Give a world a place for checkpoints, if its plan has any."""
    if plan.save_s is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="ratchet-checkpoints-") as root:
        keep = plan.config.checkpoint.keep
        yield WorldCheckpoints(Path(root) / "checkpoints", keep=keep, write_s=plan.save_s)


async def _live(
    plan: Plan,
    outcome: Outcome,
    worlds: list[World],
    disk: Disk | None,
    checkpoints: WorldCheckpoints | None,
) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: outcome.leaks.append(str(context["message"])))
    world = World(
        plan.config,
        seed=plan.seed,
        delays=plan.delays,
        links=plan.links,
        num_prompts=plan.num_prompts,
        disk=disk,
        checkpoints=checkpoints,
        payload_s=plan.payload_s,
        has_standby=plan.has_standby,
    )
    worlds.append(world)
    watch = Watch(plan, world)
    world.start()
    await world.begun.wait()
    for fault in plan.faults:
        loop.call_at(fault.at, fault.strike, world)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LIMIT_S):
            await _end(world, watch)
    outcome.virtual_s = loop.time()
    watch.finish()
    for row in world.ledger.groups():
        outcome.states.update(_STATE_AFTER[e.event] for e in world.ledger.events(row.group_id))
    world.network.observers.clear()
    outcome.problems = watch.problems
    if world.output.summaries:
        outcome.status = world.output.summaries[-1]["status"]
        outcome.steps = world.output.summaries[-1]["steps"]


async def _end(world: World, watch: Watch) -> None:
    """Wait until the leading trainer, or what the run cannot do without, has ended."""

    def vital() -> list[asyncio.Event]:
        names = {REGISTRY, BUFFER} - world.reviving
        return [*(world.ends[name].event for name in sorted(names)), watch.broken]

    while True:
        while not (world.has_ended or any(end.is_set() for end in vital())):
            ends = [t.end.event for t in world.trainers if not t.end.event.is_set()]
            waits = [asyncio.ensure_future(end.wait()) for end in (*vital(), *ends)]
            # a trainer may start, and lead, meanwhile
            await asyncio.wait(waits, timeout=50.0, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        # what is on its way arrives, what was cancelled ends, who is left alone gives up
        limits = world.network.limits
        await asyncio.sleep(20.0 + (3 * limits.dead_s + 4 * limits.delivery_s) * watch.fatal)
        if world.has_ended or any(end.is_set() for end in vital()):
            missed = world.over or world.told_of_end  # what the leading trainer does not know
            if supervision.ended_the_run(world) or missed or world.ends[REGISTRY].reason == KILLED:
                await _all_left(world)
            return  # and no other trainer has come to lead


async def _all_left(world: World) -> None:
    """Wait until everyone has ended who did not hear from the registry that the run is over.

    They look for their registry for as long as they may; a launcher would end them sooner.
    """
    longest_s = 3.2 * world.network.limits.delivery_s  # `registry_wait_s`, one ask, and drift
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(longest_s):
            await asyncio.gather(world.ended.event.wait(), world.ends[BUFFER].event.wait())


def shrink(plan: Plan, fails: Callable[[Plan], bool], *, within_s: float = 60.0) -> Plan:
    """Leave out faults, many at first and then one by one, while the world still fails.

    Delta debugging (Zeller and Hildebrandt, 2002) without its second half; stops after `within_s`
    seconds with what it has.
    """
    until = time.monotonic() + within_s
    size = len(plan.faults)
    while size and time.monotonic() < until:
        start, shrunk = 0, False
        while start < len(plan.faults) and time.monotonic() < until:
            smaller = replace(plan, faults=plan.faults[:start] + plan.faults[start + size :])
            if fails(smaller):
                plan, shrunk = smaller, True
            else:
                start += size
        if not (shrunk and size == 1):
            size //= 2
    return plan


def explain(outcome: Outcome) -> str:
    """Say what broke, after which faults, and how to see it again."""
    kind = _kind(outcome)
    ends = TooLong.__name__ not in outcome.problems[0]
    plan = outcome.plan
    if ends:
        plan = shrink(plan, lambda smaller: _kind(run(smaller)) == kind)
    lines = [f"seed {plan.seed}: {outcome.problems[0]}"]
    lines += [f"    also: {problem}" for problem in outcome.problems[1:4]]
    lines += [f"    fault: {fault}" for fault in plan.faults] or ["    without any fault"]
    lines.append(f"    replay: python -m tests.simulation {plan.seed}  (commit {commit()})")
    return "\n".join(lines)


def commit() -> str:
    """Which code this is."""
    git = shutil.which("git")
    if git is None:
        return "unknown"
    command = [git, "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _kind(outcome: Outcome) -> str:
    """What broke, without numbers."""
    words = outcome.problems[0].split() if outcome.problems else []
    return " ".join(word for word in words[:9] if word.strip("():,.").isalpha())
