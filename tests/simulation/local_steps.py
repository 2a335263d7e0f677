"""What each process of a small world does by itself: a table of reactions, filled when asked.

A process is deterministic, time stands still, and it knows others by what arrives only. So a state
inside it and an input determine its next state and its `Reaction`, whatever the others do, and one
run of one actor is good for all global states in which that input comes. States inside are named by
numbers. Worker and trainer have tasks in the middle of what they do: their states are named by the
inputs that led there. Registry and buffer are plain data between two inputs: theirs are named by
that data and what is in their files, so that orders which do not matter to them become one. Of the
dead there is left what the checks look at.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Any

import msgspec
from tests.simulation.quiet_loop import QuietLoop
from tests.simulation.small_actors import Scenario, Stage
from tests.simulation.small_life import Life, Parcel, Reaction, Received
from tests.simulation.small_network import Step, View
from tests.simulation.weights import digest_of

from ratchet.actors.buffer import BufferActor
from ratchet.actors.role import BUFFER, REGISTRY, TRAINER
from ratchet.actors.version_registry import VersionRegistry
from ratchet.messages import ClaimPrompts

_MAX_KEPT = 64
"""lives that are kept where they are, to go on from there"""


def look(life: Life, capacity: int) -> Reaction:
    """Return what a life did, with what is wrong about it."""
    reaction = life.reaction()
    problems = list(reaction.problems)
    if life.name == BUFFER and life.actor._table.num_open > capacity:
        problems.append(f"I5: {life.actor._table.num_open} groups are open")
    for output in reaction.outputs:
        claims = isinstance(output, Parcel) and isinstance(output.payload, ClaimPrompts)
        if claims and not life.parts.engine.stamped:
            problems.append(f"I4: {life.name} asks for prompts before weights")
    return reaction._replace(problems=tuple(problems))


class LocalSteps:
    """The table."""

    def __init__(self, scenario: Scenario) -> None:
        self.num_run = 0
        """inputs that were given to an actor"""
        self._scenario = scenario
        self._steps: dict[tuple[int, Received], Step] = {}
        self._starts: dict[tuple[str, int], Step] = {}
        self._locals: dict[Any, int] = {}
        self._paths: list[tuple[Any, ...]] = []
        """how each state is reached: (state before, input), or (name, number of the life)"""
        self._remains: list[str] = []
        self._kept: OrderedDict[int, tuple[Life, Stage]] = OrderedDict()

    def start(self, name: str, number: int) -> Step:
        """Begin a life."""
        step = self._starts.get((name, number))
        if step is None:
            step = self._starts[name, number] = self._note(*self._begin(name, number), name, number)
        return step

    def take(self, view: View, incoming: Received) -> Step:
        """React to an input."""
        local = view.local
        step = self._steps.get((local, incoming))
        if step is None:
            life, stage = self._kept.pop(local, None) or self._replay(local)
            life.take(incoming)
            self.num_run += 1
            step = self._steps[local, incoming] = self._note(life, stage, local, incoming)
        return step

    def kill(self, view: View) -> int:
        """Return what is left of a process that dies in this state."""
        remains = self._remains[view.local]
        return self._name(("dead", remains), ("dead",), remains)

    def close(self) -> None:
        """Let go of everything."""
        while self._kept:
            self._drop()

    def _note(self, life: Life, stage: Stage, *path: Any) -> Step:
        reaction = look(life, stage.config.buffer.capacity)
        remains = remains_of(life)
        if life.end:
            key: Any = ("dead", remains)
        elif life.name in (REGISTRY, BUFFER):
            key = (life.name, data_of(life, stage))
        else:
            key = path
        local = self._name(key, path, remains)
        if local in self._kept or life.end:
            _close(life, stage)
        else:
            self._kept[local] = life, stage
            if len(self._kept) > _MAX_KEPT:
                self._drop()
        return Step(local, reaction)

    def _name(self, key: Any, path: tuple[Any, ...], remains: str) -> int:
        local = self._locals.setdefault(key, len(self._locals))
        if local == len(self._paths):
            self._paths.append(path)
            self._remains.append(remains)
        return local

    def _replay(self, local: int) -> tuple[Life, Stage]:
        inputs = []
        while isinstance(self._paths[local][0], int):
            local, incoming = self._paths[local]
            inputs.append(incoming)
        life, stage = self._begin(*self._paths[local])
        for incoming in reversed(inputs):
            life.take(incoming)
        life.reaction()
        self.num_run += len(inputs)
        return life, stage

    def _begin(self, name: str, number: int) -> tuple[Life, Stage]:
        stage = Stage(self._scenario)
        return stage.begin(QuietLoop(), name, number), stage

    def _drop(self) -> None:
        _close(*self._kept.popitem(last=False)[1])


def _close(life: Life, stage: Stage) -> None:
    life.release()
    life.loop.drop()
    stage.close()


def remains_of(life: Life) -> str:
    """Return what the checks look at when a life is over."""
    seen: list[Any] = [life.name, life.number]
    if life.parts and life.parts.engine:
        seen.append([(version, digest_of(held)) for version, held in life.parts.engine.stamped])
    elif life.name == TRAINER:
        seen += [life.parts.backend.applied, [msgspec.msgpack.encode(b) for b in life.batches]]
    return repr(seen)


_FILES = {
    REGISTRY: {"terms": "term", "versions": "version"},
    BUFFER: {"groups": "group_id", "events": "group_id, rowid", "cursor": "rowid"},
}
"""The tables of each file, with an order in which the rows of one state are the same."""


def data_of(life: Life, stage: Stage) -> str:
    """Return what a registry or a buffer is, with its files; of the others, nothing."""
    if life.name not in _FILES:
        return ""
    asks = sorted((number, name) for number, (name, _) in life.asks.items())
    watches = sorted((name, len(them)) for name, them in life.watches.items())
    parts = [_frozen(life.actor, {}), asks, watches, sorted(life.told.items())]
    sql = (stage.store if life.name == REGISTRY else stage.ledger)._sql
    for table, order in _FILES[life.name].items():
        parts.append(sql.execute(f"SELECT * FROM {table} ORDER BY {order}").fetchall())  # noqa: S608
    return repr(parts)


_CONSTANT = {
    *("system", "name", "log", "role", "actor_urn", "actor_inbox", "actor_stopped"),
    *("_life", "_actor_ref", "_config", "_group_size", "_synchronous", "_capacity", "_numbers"),
    *("_ledger", "_source", "_wall", "_store", "_run_name", "_started"),
    *("_verdicts", "_max_reissues", "_log", "_admission", "_policy", "_size", "_lease_s"),
    *("_max_staleness", "groups", "_reject", "_own_calls"),
    # what follows from the roles that are there, what is only counted, and a clock
    *("_vacancy", "_counts", "_window", "_now"),
}
"""Attributes of a registry or a buffer that do not change, or are looked at elsewhere."""


def _frozen(value: Any, seen: dict[int, int]) -> Any:
    """Return the state of an actor as plain data; whatever is not known here raises.

    What several parts of an actor share is written out once, and named by its number after that.
    """
    if value is None or isinstance(value, int | str | float | bytes | msgspec.Struct):
        return value
    if isinstance(value, Counter | set):
        return sorted(dict(value).items() if isinstance(value, Counter) else value)
    if isinstance(value, dict):
        return [(_frozen(key, seen), _frozen(one, seen)) for key, one in value.items()]
    if isinstance(value, list | tuple | deque):
        return [_frozen(one, seen) for one in value]
    ours = type(value).__module__.startswith(("ratchet.actors", "ratchet.staleness"))
    if not ours and not isinstance(value, BufferActor | VersionRegistry):
        raise TypeError(f"{value!r} is part of a state")
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = len(seen)
    slots = getattr(value, "__slots__", None)
    fields = {slot: getattr(value, slot) for slot in slots} if slots else vars(value)
    return [(name, _frozen(one, seen)) for name, one in fields.items() if name not in _CONSTANT]
