"""Every interleaving of one publish with one finish, one claim, one batch and one crash.

`python -m tests.simulation.exhaustive --all` (or names of scenarios) explores them whole and prints
what they took. A depth-first search chooses each event of a small world, until nothing is left that
the scenario lets happen. Each such end is replayed in a `SmallWorld`, whose rest then runs, and the
invariants are checked as in random worlds.

Why it is fast, and loses nothing:

* A global state is one `View` of each process: what is inside it, and what is on its way to it. An
  event happens at one process, depends on its view alone, and touches other views by what it sends
  to them, in ways that depend on theirs alone (`small_network`). So the search computes with
  numbers of views, and a reaction or an effect is computed once for all states in which it occurs.
* What is inside a process, and how it reacts, is a table that its actor fills (`local_steps`, which
  also says which insides are one). Orders that differ only between processes meet in one state.
* A parcel that its actor does nothing with commutes with all events, wherever it is in its queue,
  and arrives at once (`small_world.is_silent`).

All three are tried, not believed: each replay of an end is made by real actors in one world, which
stops with an error if one of them reacts otherwise than the table says, or is not silent. And
`explore_each_path` and `walk` follow paths without any of it; their ends must be among those found.

What stays outside: the order in which the tasks of one process run between two events, as each
event is followed up until nothing is ready; and deadlines, which pass in the rest only.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.simulation.local_steps import LocalSteps, data_of, remains_of
from tests.simulation.small_actors import NAMES, SCENARIOS
from tests.simulation.small_checks import check
from tests.simulation.small_network import Effect, Event, View, happen, hears
from tests.simulation.small_world import SmallWorld, choices, is_silent

Path = tuple[Any, ...]
"""(path before, event): a path shares its beginning with those that branch off it"""


@dataclass
class Report:
    """What a search has seen."""

    scenario: str
    num_states: int = 0
    num_steps: int = 0
    """inputs that were given to one actor by itself"""
    num_ends: int = 0
    num_left: int = 0
    """branches that were left when it stopped"""
    cpu_s: float = 0.0
    outcomes: set[str] = field(default_factory=set)
    """what there is at each end, but for the order in which it came about"""
    problems: dict[str, list[Event]] = field(default_factory=dict)
    """each problem, with the first path to it"""

    def __str__(self) -> str:
        text = (
            f"{self.scenario}: {self.num_states} states, {self.num_steps} local steps,"
            f" {self.num_ends} ends ({len(self.outcomes)} different), {self.cpu_s:.1f} s CPU"
        )
        return f"{text}, stopped with {self.num_left} branches left" if self.num_left else text

    def end(self, world: SmallWorld, path: Path) -> None:
        """Run the rest of a world, and check it."""
        self.num_ends += 1
        self.outcomes.add(_outcome(world))
        world.rest()
        self.found(check(world), path)

    def found(self, problems: Iterable[str], path: Path) -> None:
        """Note problems."""
        for problem in problems:
            self.problems.setdefault(problem, events_of(path))


_BITS = 20
"""of a state are the number of one process's view; more would be an error"""
_MASK = (1 << _BITS) - 1
_SHIFTS = {name: index * _BITS for index, name in enumerate(NAMES)}


class _Turn(NamedTuple):
    event: Event
    change: int
    """of the state, as far as this process goes"""
    effects: tuple[tuple[int, int], ...]
    """(shift of the process, effect)"""
    problems: tuple[str, ...]


class Search:
    """A depth-first search of one scenario, each state once."""

    def __init__(self, name: str) -> None:
        self.report = Report(name)
        self._scenario = SCENARIOS[name]
        self._steps = LocalSteps(self._scenario)
        self._views: dict[View, int] = {}
        self._all_views: list[View] = []
        self._effects: dict[Effect, int] = {}
        self._all_effects: list[Effect] = []
        self._turns: dict[int, list[_Turn]] = {}
        self._changes: dict[tuple[int, int], int] = {}
        world = SmallWorld(self._scenario, self._steps)
        start = 0
        for name, view in world.views.items():
            start |= self._number(view) << _SHIFTS[name]
        world.close()
        self._seen = {start}
        self._stack: list[tuple[int, Path]] = [(start, ())]

    def run(self, *, within_s: float = 1e9, until_found: bool = False) -> Report:
        """Go on until all is seen, for so many CPU seconds, or until the first problem."""
        report = self.report
        started = time.process_time() - report.cpu_s
        while self._stack and report.cpu_s < within_s:
            self._expand(*self._stack.pop())
            report.cpu_s = time.process_time() - started
            report.num_left = len(self._stack)
            report.num_steps = self._steps.num_run
            if report.problems and until_found:
                break
        return report

    def close(self) -> None:
        """Let go of the processes that are kept."""
        self._steps.close()

    def _expand(self, state: int, path: Path) -> None:
        self.report.num_states += 1
        is_end = True
        for shift in _SHIFTS.values():
            for turn in self._turns_of(state >> shift & _MASK):
                is_end = False
                if turn.problems:
                    self.report.found(turn.problems, (path, turn.event))
                    continue
                after = state + turn.change
                for other, effect in turn.effects:
                    after += self._change_by(after >> other & _MASK, effect) << other
                if after not in self._seen:
                    self._seen.add(after)
                    self._stack.append((after, (path, turn.event)))
        if is_end:
            self._end(path)

    def _end(self, path: Path) -> None:
        with closing(SmallWorld(self._scenario, self._steps)) as world:
            for event in events_of(path):
                world.do(event)
            self.report.end(world, path)

    def _turns_of(self, number: int) -> list[_Turn]:
        turns = self._turns.get(number)
        if turns is None:
            view = self._all_views[number]
            events = choices(self._scenario, view)
            turns = self._turns[number] = [self._turn(number, event) for event in events]
        return turns

    def _turn(self, number: int, event: Event) -> _Turn:
        view = self._all_views[number]
        move = happen(view, event, self._steps)
        effects = tuple(
            (shift, self._effect(effect))
            for target, effect in move.effects
            if not is_silent(effect)
            for name, shift in _SHIFTS.items()
            if name == target or (not target and name != view.name)
        )
        change = self._number(move.view) - number << _SHIFTS[view.name]
        return _Turn(event, change, effects, move.problems)

    def _change_by(self, number: int, effect: int) -> int:
        """Return by how much an effect changes the number of a view."""
        change = self._changes.get((number, effect))
        if change is None:
            after = hears(self._all_views[number], self._all_effects[effect])
            change = self._changes[number, effect] = self._number(after) - number
        return change

    def _number(self, view: View) -> int:
        number = self._views.setdefault(view, len(self._views))
        if number == len(self._all_views):
            self._all_views.append(view)
        return number

    def _effect(self, effect: Effect) -> int:
        number = self._effects.setdefault(effect, len(self._effects))
        if number == len(self._all_effects):
            self._all_effects.append(effect)
        return number


def explore_each_path(name: str) -> Report:
    """Follow each interleaving by itself, in whole worlds: no state is merged with another."""
    report = Report(name)
    branches: list[Path] = [()]
    while branches:
        path = branches.pop()
        with closing(SmallWorld(SCENARIOS[name])) as world:
            for event in events_of(path):
                world.do(event)
            while events := world.choices():
                report.num_states += 1
                branches += [(path, event) for event in events[1:]]
                path = path, events[0]
                world.do(events[0])
            report.end(world, path)
    return report


def walk(name: str, rng: random.Random) -> Report:
    """Follow one interleaving, drawn at random, in a whole world."""
    report = Report(name)
    path: Path = ()
    with closing(SmallWorld(SCENARIOS[name])) as world:
        while events := world.choices():
            path = path, rng.choice(events)
            world.do(path[1])
        report.end(world, path)
    return report


def events_of(path: Path) -> list[Event]:
    """Return the events of a path."""
    events = []
    while path:
        path, event = path
        events.append(event)
    return events[::-1]


def _outcome(world: SmallWorld) -> str:
    """Return all that an end is: the data inside, what was seen of it, what is on its way."""
    lives = [(data_of(life, world.stage), remains_of(life)) for life in world.lives]
    return repr((lives, [view._replace(local=0, before=0) for view in world.views.values()]))


def main(names: list[str]) -> int:
    """Explore whole scenarios, by name or `--all`, or `small`; return the number of problems."""
    num_problems = 0
    if names == ["--all"]:
        names = [name for name, scenario in SCENARIOS.items() if not scenario.is_huge]
    for name in names or ["small"]:
        with closing(Search(name)) as search:
            while search.run(within_s=search.report.cpu_s + 30).num_left:
                sys.stderr.write(f"{search.report}\n")
        report = search.report
        sys.stdout.write(f"{report}\n")
        for problem, path in report.problems.items():
            num_problems += 1
            steps = "".join(f"\n        {event}" for event in path)
            sys.stdout.write(f"    {problem}{steps}\n")
        sys.stdout.flush()
    return num_problems


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
