"""Faults of supervisors: deaths unnoticed, restarts without limit, pause or need."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tests.simulation.faults import Kill
from tests.simulation.mutants.base import Patches, mutant
from tests.simulation.ordinary import ordinary

from ratchet.actors.restarts import Judge
from ratchet.actors.supervisor import Supervisor


@mutant("a child is started again without limit", seed=2)
def restarted_without_limit() -> Patches:
    restart = Judge._restart

    def forgetful(self: Any, end: Any, now: float, *, lived_s: float) -> Any:
        self._recent.clear()
        return restart(self, end, now, lived_s=lived_s)

    return [(Judge, "_restart", forgetful)]


@mutant(
    "a failure counts for ever against the limit",
    world=ordinary(  # the second death comes when the first should be forgotten
        Kill(30.0, ("rollout-0",), every_s=40.0, times=2),
        runtime={"max_restarts": 1, "restart_window_s": 30.0},
    ),
)
def failures_never_forgotten() -> Patches:
    restart = Judge._restart

    def unforgiving(self: Any, end: Any, now: float, *, lived_s: float) -> Any:
        self._rules = replace(self._rules, window_s=math.inf)
        return restart(self, end, now, lived_s=lived_s)

    return [(Judge, "_restart", unforgiving)]


@mutant("restarts do not back off", seed=2)
def no_back_off() -> Patches:
    return [(Judge, "_backoff", lambda self, name, lived_s: 0.0)]


@mutant("a child that ended in order is started again", seed=2)
def started_again_after_the_end() -> Patches:
    return [(Judge, "_is_due", staticmethod(lambda child, end: True))]


@mutant("the death of a second life is not noticed (trl#5751)", seed=2)
def death_unnoticed() -> Patches:
    start = Supervisor._start

    async def only_once(self: Any, name: str) -> Any:
        seen = self.__dict__.setdefault("_seen", set())
        verdict = await start(self, name)
        if name in seen:
            self._watchers[name].cancel()
        seen.add(name)
        return verdict

    return [(Supervisor, "_start", only_once)]


@mutant("a child is started beside its older life", seed=22)
def started_beside_itself() -> Patches:
    async def no_stop(self: Any, names: Any) -> None:
        for name in tuple(names):
            self._watchers.pop(name).cancel()

    return [(Supervisor, "_stop", no_stop)]


@mutant("a supervisor that gives up tells nobody", seed=67)
def gives_up_in_silence() -> Patches:
    async def silent(self: Any, verdict: Any) -> None:
        return

    return [(Supervisor, "_tell_escalation", silent)]
