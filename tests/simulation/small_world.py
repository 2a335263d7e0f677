"""A whole small world: every event is chosen, or the oldest one happens.

The four actors in processes of their own, on one loop, with the links of `small_network` between
them. It begins where version 0 is live, its worker holds it and has groups in flight, and the
trainer waits for a batch. From there `do` lets an event happen; `rest` runs what is left, oldest
first, and then the deadlines. `small_checks` looks at the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from tests.simulation.local_steps import look
from tests.simulation.quiet_loop import QuietLoop
from tests.simulation.small_actors import NAMES, TRAINER, WORKER, Scenario, Stage
from tests.simulation.small_life import Life, Parcel, Reaction, Received
from tests.simulation.small_network import (
    Effect,
    Event,
    Move,
    Processes,
    Step,
    View,
    enabled,
    happen,
    hears,
    reacted,
)

from ratchet.actors.role import BUFFER
from ratchet.messages import BatchReady, RoleJoined, RoleLeft, VersionUpdated

_LONG_S = 5e3
_MANY = 2000


def choices(scenario: Scenario, view: View) -> Iterator[Event]:
    """List what a scenario lets happen at a process: a crash and a restart last."""
    first = view.number == 0
    for event in enabled(view):
        if event.kind != "done" or (first and (event.process, event.what) in scenario.work):
            yield event
    if first and view.name == scenario.victim:
        if view.alive:
            yield Event("crash", view.name)
        elif scenario.restarts:
            yield Event("restart", view.name)


def is_silent(effect: Effect) -> bool:
    """Tell whether an actor does nothing with a parcel.

    It commutes with everything, wherever it is in its queue: it may as well arrive at once.
    """
    if not isinstance(effect, Parcel) or effect.kind != "tell":
        return False
    message = effect.payload
    if isinstance(message, VersionUpdated):
        return effect.receiver in (WORKER, TRAINER)
    news = isinstance(message, RoleJoined | RoleLeft) and effect.receiver == WORKER
    return news and message.role.name != BUFFER


class SmallWorld:
    """One replay: prepared when it is made.

    Args:
        table: what each process is expected to do by itself; it is compared with what it does.
            Then also what is silent arrives at once.
    """

    def __init__(self, scenario: Scenario, table: Processes | None = None) -> None:
        self.scenario = scenario
        self.stage = Stage(scenario)
        self.loop = QuietLoop()
        self.leaks: list[str] = []
        self.loop.set_exception_handler(lambda _, c: self.leaks.append(str(c["message"])))
        self.problems: list[str] = []
        self.lives: list[Life] = []
        self.newest: dict[str, Life] = {}
        self.views = {name: View(name) for name in NAMES}
        self.num_deaths = 0
        self._merges = table is not None
        self._table = table
        for name in NAMES:
            self.do(Event("restart", name))
        self._waiting: dict[Event, None] = {}
        while event := self._oldest(work=False):
            self.do(event)
        in_flight = self.stage.ledger.counts()["claimed"]
        assert in_flight == self.stage.config.buffer.capacity, "the world is not prepared"

    @property
    def batches(self) -> list[BatchReady]:
        """Every batch that a trainer was handed."""
        return [batch for life in self.lives for batch in life.batches]

    @property
    def summaries(self) -> list[dict[str, Any]]:
        """What the newest trainer wrote at its end."""
        return self.newest[TRAINER].parts.output.summaries

    def choices(self) -> list[Event]:
        """List what the scenario lets happen next."""
        return [e for view in self.views.values() for e in choices(self.scenario, view)]

    def do(self, event: Event) -> None:
        """Let it happen, and look."""
        self.num_deaths += event.kind == "crash"
        self._apply(event.process, happen(self.views[event.process], event, self))

    def rest(self) -> None:
        """Run what is left, oldest first, then the deadlines."""
        self._table = None
        victim = self.scenario.victim or WORKER
        for _ in range(_MANY):
            if event := self._oldest():
                self.do(event)
            elif not self.views[victim].alive and not self.summaries:
                self.do(Event("restart", victim))
            elif self._goes_on() and self.loop.jump():
                for life in self.lives:
                    self._apply(life.name, reacted(self.views[life.name], self._look(life)))
            else:
                break

    def close(self) -> None:
        """Let go of everything."""
        for life in self.lives:
            life.release()
        self.loop.drop()
        self.stage.close()

    # --- what is inside the processes

    def start(self, name: str, number: int) -> Step:
        """Begin a life."""
        life = self.stage.begin(self.loop, name, number)
        self.lives.append(life)
        self.newest[name] = life
        return self._step(life, self._table and self._table.start(name, number))

    def take(self, view: View, incoming: Received) -> Step:
        """Let a process react."""
        life = self.newest[view.name]
        life.take(incoming)
        return self._step(life, self._table and self._table.take(view, incoming))

    def kill(self, view: View) -> int:
        """End a process."""
        self.newest[view.name].die("killed")
        return self._table.kill(view) if self._table else 0

    def _step(self, life: Life, expected: Step | None) -> Step:
        step = Step(0, self._look(life))
        if expected is None:
            return step
        if expected.reaction != step.reaction:
            raise AssertionError(f"{life.name}: {step.reaction}, not {expected.reaction}")
        return expected

    def _look(self, life: Life) -> Reaction:
        return look(life, self.stage.config.buffer.capacity)

    # --- between them

    def _apply(self, name: str, move: Move) -> None:
        self.views[name] = move.view
        self.problems += move.problems
        for target, effect in move.effects:
            for other in [target] if target else NAMES:
                if self._merges and is_silent(effect):
                    self._arrive(other, effect)
                elif other != name:
                    self.views[other] = hears(self.views[other], effect)

    def _arrive(self, name: str, parcel: Any) -> None:
        if self.views[name].alive:
            self.newest[name].take(parcel)
            reaction = self._look(self.newest[name])
            assert not reaction.outputs, f"{name} is not silent about {parcel}: {reaction}"

    def _oldest(self, *, work: bool = True) -> Event | None:
        """Choose what could have happened for longest."""
        now = [e for view in self.views.values() for e in enabled(view) if work or e.kind != "done"]
        here = set(now)
        self._waiting = dict.fromkeys(e for e in itertools.chain(self._waiting, now) if e in here)
        event = next(iter(self._waiting), None)
        if event is not None:
            del self._waiting[event]
        return event

    def _goes_on(self) -> bool:
        return any(view.alive for view in self.views.values()) and self.loop.now < _LONG_S
