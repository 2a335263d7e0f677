"""What must hold of those who start workers again, computed from the lives that they have started.

Consumes the launchers of a world and their workers' lives; produces what is wrong. Waits for
nothing. It shares no code with the supervisor: the times of all starts and ends are looked at once,
when the world is over.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ratchet.actors.role import LOST, ORDERLY, REGISTRY

if TYPE_CHECKING:
    from tests.simulation.launcher import Launcher
    from tests.simulation.lives import Trainer, Worker
    from tests.simulation.world import World

    Life = Worker | Trainer

_GRACE_S = 1.0
"""A failure that blames another is judged this much later."""
_STOP_S = 3.0
"""A worker that is told to stop has this long; then it is killed."""
_SLACK_S = 1.0


def failed(life: Life) -> bool:
    """It has ended, and was not told to."""
    return life.end.event.is_set() and life.end.reason != ORDERLY


def is_over_for(life: Life) -> bool:
    """It has ended in order, and nobody should start it again."""
    ended = life.end.event.is_set() and life.end.reason == ORDERLY
    return ended and life.host.system.run_ended is not None


def gave_up(launcher: Launcher) -> bool:
    """It has stopped what it had, for too many failures, or for one that nothing mends."""
    outcome = launcher.outcome
    return outcome is not None and outcome.status in {"failed", "user_error"}


def ended_the_run(world: World) -> bool:
    """A launcher that had the whole run has given up, and said so."""
    return any(map(_ends_run, world.every_launcher))


def nobody_left(world: World) -> bool:
    """All launchers have given up: the run waits for workers in vain."""
    rollouts = [each for each in world.launchers if each.workers[0].startswith("rollout")]
    return all(map(gave_up, rollouts))


def check(world: World, *, heard: bool) -> Iterator[str]:
    """Say what is wrong with the supervision of a world; `heard`: nothing keeps the registry from
    hearing what it is told.
    """
    for launcher in world.every_launcher:
        by_name = [[w for w in launcher.lives if w.name == name] for name in launcher.workers]
        if launcher.task.done() and not launcher.task.cancelled() and launcher.task.exception():
            yield f"{launcher.name} broke: {launcher.task.exception()}"
        for lives in by_name:
            yield from _started_again(world, launcher, lives)
            yield from _one_after_the_other(world, launcher, lives)
            if world.config.runtime.restart_strategy == "one_for_one":
                yield from _backs_off(world, launcher, lives)
        yield from _intensity(world, launcher)
        yield from _tells_the_end(world, launcher, heard=heard)


def _started_again(world: World, launcher: Launcher, lives: list[Life]) -> Iterator[str]:
    """Whoever failed lives again soon, unless its launcher ends."""
    stops_s = _STOP_S * len(launcher.workers)
    within_s = world.config.runtime.backoff_most_s + _GRACE_S + stops_s + _SLACK_S
    until = _until(world, launcher)
    for life, following in itertools.zip_longest(lives, lives[1:]):
        if not failed(life):
            continue
        due = life.end.at + within_s * 1.05  # its clock may be slow
        late = due < until if following is None else following.started > due
        if late:
            yield f"{life.incarnation} failed ({life.end.reason}), and was not started again"


def _one_after_the_other(world: World, launcher: Launcher, lives: list[Life]) -> Iterator[str]:
    # by the other strategies it may be started again with one that failed
    alone = world.config.runtime.restart_strategy == "one_for_one"
    for life, following in itertools.pairwise(lives):
        if not life.end.event.is_set() or following.started < life.end.at:
            yield f"{launcher.name} started {following.incarnation} beside {life.incarnation}"
        elif alone and is_over_for(life):
            yield f"{life.incarnation} had ended in order, and was started again"


def _backs_off(world: World, launcher: Launcher, lives: list[Life]) -> Iterator[str]:
    """The pause doubles from failure to failure, until a life was long enough."""
    runtime = world.config.runtime
    local = launcher.host.process.local
    pause_s = runtime.backoff_first_s
    for life, following in itertools.pairwise(lives):
        lived_s = local(life.end.at) - local(life.started)
        if lived_s + _GRACE_S >= runtime.restart_window_s:
            pause_s = runtime.backoff_first_s
        waited_s = local(following.started) - local(life.end.at)
        least_s = min(pause_s, runtime.backoff_most_s)
        if waited_s < least_s - 1e-6:
            yield f"{following.incarnation} came {waited_s:g} s after {life.incarnation}'s failure"
        pause_s *= 2


def _intensity(world: World, launcher: Launcher) -> Iterator[str]:
    """It gives up after `max_restarts` failures within the window, and not before."""
    runtime = world.config.runtime
    local = launcher.host.process.local
    ends = sorted(local(life.end.at) for life in launcher.lives if failed(life))
    spans = [b - a for a, b in zip(ends, ends[runtime.max_restarts :], strict=False)]
    least_s = min(spans, default=float("inf"))
    window_s = runtime.restart_window_s
    # with the other strategies a failure of one that is being stopped does not count
    counts_all = runtime.restart_strategy == "one_for_one"
    judged = bool(ends) and ends[-1] + _GRACE_S + _STOP_S < local(_until(world, launcher))
    if counts_all and judged and least_s < window_s - 2 * _GRACE_S and not gave_up(launcher):
        yield f"{launcher.name} goes on after {len(ends)} failures, the densest in {least_s:g} s"
    gave = gave_up(launcher) and not (_replaced(launcher) or _had_the_last_word(launcher))
    if gave and least_s > window_s + 2 * _GRACE_S:
        yield f"{launcher.name} gave up too early: {launcher.outcome}"


def _tells_the_end(world: World, launcher: Launcher, *, heard: bool) -> Iterator[str]:
    told = any(line[1:] == (launcher.name, REGISTRY, "EndRun") for line in world.network.trace)
    if told and not (launcher.whose == "run" and gave_up(launcher)):
        yield f"{launcher.name} ended the run; {launcher.outcome}"
    registry = world.network.hosts[REGISTRY]
    ended = registry.system.run_ended
    if heard and _ends_run(launcher) and registry.lives and ended is None:
        yield f"{launcher.name} gave up ({launcher.outcome}), and the run goes on"


def _ends_run(launcher: Launcher) -> bool:
    return launcher.whose == "run" and gave_up(launcher) and not _replaced(launcher)


def _until(world: World, launcher: Launcher) -> float:
    return world.network.loop.now if launcher.ended_at is None else launcher.ended_at


def _replaced(launcher: Launcher) -> bool:
    return launcher.outcome is not None and launcher.outcome.status == "user_error"


def _had_the_last_word(launcher: Launcher) -> bool:
    """A trainer of it has said why the run cannot go on."""
    reasons = [life.end.reason for life in launcher.lives if life.name.startswith("trainer")]
    return any(each.startswith("RunFailed") and LOST not in each for each in reasons[-1:])
