"""What a number of worlds has reached, and what none of them has.

Consumes outcomes, produces a tally that can be added up over processes (it travels as JSON), and a
report for people. Waits for nothing.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, get_args

import msgspec
from tests.simulation import faults, trainer_faults, weight_faults

from ratchet import messages
from ratchet.storage.groups import STATES

if TYPE_CHECKING:
    from tests.simulation.simulate import Outcome

TOLD = frozenset(cls.__name__ for cls in get_args(messages.WireMessage)) - {"RoleReported"}
"""Messages that a world can show; who reports on a role is not part of it."""

EVENTS = frozenset(
    {
        "actor_failed", "auth_failed", "batch_not_due", "claim_of_another_life", "end_fenced",
        "engine_failed", "evaluated", "evaluation_failed", "evaluation_skipped", "group_failed",
        "group_stale",
        "late_finish", "lease_ended", "lease_expired", "lineage_unanswered", "link_cut",
        "link_open", "load_failed", "peer_ended", "peer_silent", "request_fenced", "role_joined",
        "role_left", "run_ended", "step_fenced", "step_skipped", "term_acquired",
        "transfer_failed", "version_burnt", "version_updated", "dead_letter",
    }
)  # fmt: skip
"""Events of the log that say that something out of the ordinary was handled."""


def kinds_of_faults() -> frozenset[str]:
    """The names of all faults."""
    return frozenset(
        cls.__name__
        for module in (faults, trainer_faults, weight_faults)
        for cls in vars(module).values()
        if isinstance(cls, type) and issubclass(cls, faults.Fault) and cls is not faults.Fault
        if not cls.__name__.startswith("_")
    )


class Tally(msgspec.Struct):
    """Counts over worlds."""

    worlds: int = 0
    failed: int = 0
    virtual_s: float = 0.0
    faults: int = 0
    steps: int = 0
    statuses: dict[str, int] = {}
    kinds: dict[str, int] = {}
    pairs: dict[str, int] = {}
    messages: dict[str, int] = {}
    states: dict[str, int] = {}
    events: dict[str, int] = {}
    leaks: dict[str, int] = {}
    failures: list[str] = []

    def add(self, outcome: Outcome) -> None:
        """Count one world."""
        struck = [f for f in outcome.plan.faults if f.at <= outcome.virtual_s]
        self.worlds += 1
        self.virtual_s += outcome.virtual_s
        self.faults += len(struck)
        self.steps += outcome.steps
        _count(self.statuses, [outcome.status])
        _count(self.kinds, (fault.kind for fault in struck))
        kinds = sorted({fault.kind for fault in struck})
        _count(self.pairs, map(" + ".join, itertools.combinations(kinds, 2)))
        _count(self.messages, (line[3] for line in outcome.trace))
        _count(self.states, outcome.states)
        _count(self.events, (event for log in outcome.logs.values() for _, event, _ in log))
        _count(self.leaks, outcome.leaks)

    def merge(self, other: Tally) -> None:
        """Add the counts of another process."""
        for field in self.__struct_fields__:
            mine, theirs = getattr(self, field), getattr(other, field)
            if isinstance(mine, dict):
                for key, count in theirs.items():
                    mine[key] = mine.get(key, 0) + count
            elif isinstance(mine, list):
                mine.extend(theirs)
            else:
                setattr(self, field, mine + theirs)


def report(tally: Tally, seconds: float) -> Iterator[str]:
    """Say what was run and reached, and what was not."""
    yield f"{tally.worlds} worlds, {tally.failed} broke an invariant; {_list(tally.statuses)}"
    yield (
        f"{tally.virtual_s / 3600:.0f} simulated hours and {tally.steps} optimiser steps"
        f" in {seconds:.0f} s; {tally.faults} faults"
    )
    yield f"faults: {_list(tally.kinds)}"
    all_kinds = kinds_of_faults()
    pairs = {" + ".join(pair) for pair in itertools.combinations(sorted(all_kinds), 2)}
    yield f"pairs of kinds of faults in one world: {len(tally.pairs)} of {len(pairs)}"
    yield f"messages: {_list(tally.messages)}"
    yield f"states of groups: {_list(tally.states)}"
    yield f"events: {_list({k: v for k, v in tally.events.items() if k in EVENTS})}"
    yield f"never reached: {', '.join(sorted(missing(tally))) or 'nothing'}"
    lonely = sorted(pairs - tally.pairs.keys())
    yield f"pairs never reached: {', '.join(lonely) or 'none'}"
    if tally.leaks:
        yield f"leaks: {_list(tally.leaks)}"


def missing(tally: Tally) -> set[str]:
    """What no world has shown."""
    return (
        {f"message {name}" for name in TOLD - tally.messages.keys()}
        | {f"fault {name}" for name in kinds_of_faults() - tally.kinds.keys()}
        | {f"state {name}" for name in set(STATES) - tally.states.keys()}
        | {f"event {name}" for name in EVENTS - tally.events.keys()}
    )


def _count(counts: dict[str, int], names: Iterable[Any]) -> None:
    for name, number in Counter(names).items():
        counts[name] = counts.get(name, 0) + number


def _list(counts: dict[str, int]) -> str:
    return ", ".join(f"{k} {v}" for k, v in sorted(counts.items(), key=lambda item: -item[1]))
