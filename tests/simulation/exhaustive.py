"""Every interleaving of one publish with one finish, one claim, one batch and one crash.

`python -m tests.simulation.exhaustive [SCENARIO ...]` explores scenarios whole and prints what they
took. Each begins where version 0 is live, its worker holds it and has groups in flight, and the
trainer waits for a batch. From there on a depth-first search chooses each event of `SmallNetwork`,
replaying from the start, until nothing is left that the scenario lets happen; then the rest runs to
its end, oldest first, and the invariants are checked as in random worlds.

Three things make it small, and lose nothing:

* An actor is deterministic, learns of others by deliveries only, and time stands still. So the
  histories of all lives, each the sequence of its own events with what they brought, determine the
  global state: orders that differ only between processes meet in one state, explored once. The
  histories after an event are known before it happens, so what was seen is not replayed.
* Registry and buffer are plain data between two events. States in which their fields, their files,
  all links, and the histories of the other lives are the same are one state.
* A delivery that its actor does nothing with commutes with all others, and happens at once.

What stays outside: the order in which the tasks of one process run between two events, as each
event is followed up until nothing is ready; and deadlines, which pass in the rest only.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from tests.helpers.config import small_config
from tests.simulation.invariants import _distance, _is_a_life
from tests.simulation.small_world import (
    Event,
    GatedBackend,
    GatedEngine,
    Life,
    MailedReceiver,
    MailedSender,
    SmallNetwork,
)
from tests.simulation.weights import Wire
from tests.simulation.world import KeptLedger, KeptVersions, Output, Scorer, World

from ratchet.actors.buffer import BufferActor
from ratchet.actors.role import BUFFER, ORDERLY, REGISTRY, TRAINER, rollout_name
from ratchet.actors.rollout import RolloutActor
from ratchet.actors.trainer import TrainerActor
from ratchet.actors.version_registry import VersionRegistry
from ratchet.messages import BatchReady, ClaimPrompts, Message, RoleJoined, RoleLeft, VersionUpdated
from ratchet.types import Prompt

if TYPE_CHECKING:
    from ratchet.actors.ref import LocalRef

WORKER = rollout_name(0)
_STEPS = 3
_LONG_S = 5e3
_MANY = 2000


@dataclass(frozen=True)
class Scenario:
    """What is explored: besides all deliveries, which work may end, and who may die."""

    work: frozenset[tuple[str, str]]
    victim: str = ""
    max_staleness: int = 0
    capacity_factor: float = 2.0
    restarts: bool = True
    """its next life is part of what is explored, and not of the rest"""


_PUBLISH = frozenset({(TRAINER, "forward 0"), (TRAINER, "step 1")})
_FIRST = frozenset({(WORKER, "generation 0.1")})
_BOTH = _FIRST | {(WORKER, "generation 1.1")}

SCENARIOS = {
    "tiny": Scenario(_BOTH),
    "tiny crash": Scenario(_FIRST, victim=WORKER, capacity_factor=1.0, restarts=False),
    "small": Scenario(_PUBLISH | _FIRST, capacity_factor=1.0),
    "publish": Scenario(_PUBLISH | _BOTH),
    "stale": Scenario(_PUBLISH | _BOTH, max_staleness=1),
    "crash": Scenario(_PUBLISH | _FIRST, victim=WORKER, capacity_factor=1.0, restarts=False),
    "base": Scenario(_PUBLISH | _FIRST, victim=WORKER, capacity_factor=1.0),
    "worker": Scenario(_PUBLISH | _BOTH, victim=WORKER),
    "trainer": Scenario(_PUBLISH | _FIRST, victim=TRAINER, capacity_factor=1.0),
}


class Parts(NamedTuple):
    """What a test looks at in a process."""

    engine: GatedEngine | None = None
    receiver: MailedReceiver | None = None
    backend: GatedBackend | None = None
    sender: MailedSender | None = None
    output: Output | None = None


class SmallWorld:
    """One replay: prepared when it is made."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.problems: list[str] = []
        self.net = SmallNetwork()
        self.config = small_config(
            rollout={"num_workers": 1, "group_size": 1, "max_tokens": 2},
            buffer={
                "batch_groups": 1,
                "capacity_factor": scenario.capacity_factor,
                "max_staleness": scenario.max_staleness,
            },
            algorithm={"advantage": "mean"},
            trainer={"num_steps": _STEPS, "batch_timeout_s": 1000.0},
            eval={"num_prompts": 0},
        )
        self.wire = Wire(load_s=0.0)
        self.store = KeptVersions.open(None)
        self.ledger = KeptLedger.open(None)
        self.batches: list[BatchReady] = []
        self._heard: dict[Life, list[tuple[int, int]]] = {}
        self._num_deaths = 0
        self.net.observers.append(self._observe)
        for name in (REGISTRY, BUFFER, WORKER, TRAINER):
            self.begin(name)
        while events := [event for event in self.net.enabled() if event.kind != "done"]:
            self.net.do(events[0])
        in_flight = self.ledger.counts()["claimed"]
        assert in_flight == self.config.buffer.capacity, "the world is not prepared"
        for life in self.net.lives:
            life.history = 0

    # --- processes

    def begin(self, name: str) -> None:
        """Start the next life of a process."""
        start: Callable[[Life], LocalRef] = {
            REGISTRY: self._registry,
            BUFFER: self._buffer,
            WORKER: self._worker,
            TRAINER: self._trainer,
        }[name]
        self.net.begin(name, start)

    def _registry(self, life: Life) -> LocalRef:
        class Seen(VersionRegistry):
            def on_start(self) -> None:
                life.actor = self

        return Seen.start(life.system, REGISTRY, store=self.store)

    def _buffer(self, life: Life) -> LocalRef:
        world = self

        class Seen(BufferActor):
            def on_start(self) -> None:
                life.actor = self
                world.table = self._table
                super().on_start()

        return Seen.start(
            life.system,
            self.net.role("buffer", life),
            config=self.config,
            prompts=[Prompt(f"p{i}", f"problem {i}") for i in range(9)],
            ledger=self.ledger,
        )

    def _worker(self, life: Life) -> LocalRef:
        engine = GatedEngine(self.net, life)
        receiver = MailedReceiver(self.net, life, self.wire, TRAINER)
        life.parts = Parts(engine=engine, receiver=receiver)
        return RolloutActor.start(
            life.system,
            self.net.role("rollout", life),
            config=self.config,
            engine=engine,
            receiver=receiver,
            scorer=Scorer(),
            eval_prompts=[],
        )

    def _trainer(self, life: Life) -> LocalRef:
        backend, output = GatedBackend(self.net, life), Output()
        sender = MailedSender(self.net, life, self.wire, lambda: backend.weights)
        life.parts = Parts(backend=backend, sender=sender, output=output)
        return TrainerActor.start(
            life.system,
            self.net.role("trainer", life),
            config=self.config,
            backend=backend,
            sender=sender,
            output=output,
            warm_start_prompts=[],
        )

    # --- what may happen

    def enabled(self) -> list[Event]:
        """List what the scenario lets happen next, oldest first; a crash and a restart last."""
        events = [
            event
            for event in self.net.enabled()
            if event.kind != "done"
            or (
                self.net.newest[event.process].number == 0
                and (event.process, event.what) in self.scenario.work
            )
        ]
        victim = self.scenario.victim
        if victim and self.net.newest[victim].number == 0:
            if self.net.newest[victim].alive:
                events.append(Event("crash", victim))
            elif self.scenario.restarts:
                events.append(Event("restart", victim))
        return events

    def do(self, event: Event) -> None:
        """Let it happen, and look."""
        if event.kind == "restart":
            self.begin(event.process)
        else:
            self._num_deaths += event.kind == "crash"
            self.net.do(event)
        num_open = self.table.num_open
        self.expect(num_open <= self.config.buffer.capacity, f"I5: {num_open} groups are open")

    def silent(self) -> Event | None:
        """Return a delivery to an actor that does nothing with it, if there is one.

        It commutes with everything, and only holds up what comes behind it: it need not wait.
        """
        for event in self.net.enabled():
            message = self.net.head(event)
            if isinstance(message, VersionUpdated) and event.process in (WORKER, TRAINER):
                return event
            news = isinstance(message, RoleJoined | RoleLeft) and event.process == WORKER
            if news and message.role.name != BUFFER:
                return event
        return None

    def histories(self, event: Event | None = None) -> int:
        """Return a hash of the histories of all lives, now or after one more event."""
        histories = {(life.name, life.number): life.history for life in self.net.lives}
        if event is not None:
            name, number, history = self.net.history_after(event)
            histories[name, number] = history
        return hash(frozenset(histories.items()))

    def state(self) -> int:
        """Return a hash of what determines everything that may follow; see the module."""
        parts: list[Any] = []
        for life in self.net.lives:
            parts.append((life.name, life.number, life.alive, life.clean))
            if life.name in (REGISTRY, BUFFER):
                watches = [(name, len(them)) for name, them in life.watches.items()]
                parts.append((_frozen(life.actor), sorted(life.asks.values()), watches))
            else:
                parts.append(life.history)
        parts.append(self.ledger._sql.execute("SELECT * FROM groups").fetchall())
        events = self.ledger._sql.execute("SELECT * FROM events ORDER BY group_id, rowid")
        parts.append(events.fetchall())
        parts.append(self.store.records())
        parts.append(self.net.underway())
        return hash(repr(parts))

    def expect(self, holds: bool, problem: str) -> None:
        """Note what does not hold."""
        if not holds:
            self.problems.append(problem)

    def _observe(self, sender: Life, receiver: Life, message: Message) -> None:
        if isinstance(message, VersionUpdated):
            heard = self._heard.setdefault(receiver, [])
            new = message.record.term, message.record.version
            last = heard[-1] if heard else (0, -1)
            forward = new[0] >= last[0] and new[1] > last[1]
            self.expect(forward, f"I1: {receiver.name} heard {last}, then {new}")
            heard.append(new)
        elif isinstance(message, BatchReady):
            self.batches.append(message)
        elif isinstance(message, ClaimPrompts):
            held = sender.parts.engine.stamped
            self.expect(bool(held), f"I4: {sender.name} asks for prompts before weights")

    # --- the end

    def finish(self) -> None:
        """Run what is left, oldest first, then the deadlines; check everything."""
        net = self.net
        for _ in range(_MANY):
            if events := net.enabled():
                self.do(events[0])
            elif not net.newest[self.scenario.victim or WORKER].alive and not self.summaries:
                self.begin(self.scenario.victim or WORKER)
            elif not self._goes_on() or not net.loop.jump():
                break
        for check in (
            self._ended_well,
            self._staleness,
            self._conservation,
            self._versions,
            self._stamps,
        ):
            try:
                check()
            except Exception as error:  # noqa: BLE001 - a check that cannot be made is a finding
                self.problems.append(f"{check.__name__}: {type(error).__name__}: {error}")

    def _goes_on(self) -> bool:
        return any(life.alive for life in self.net.lives) and self.net.loop.now < _LONG_S

    @property
    def summaries(self) -> list[dict[str, Any]]:
        """What the newest trainer wrote at its end."""
        return self.net.newest[TRAINER].parts.output.summaries

    def _ended_well(self) -> None:
        summaries = self.summaries
        done = [(s["status"], s["steps"]) for s in summaries]
        self.expect(done == [("finished", _STEPS)], f"I7: the run ended with {summaries}")
        for life in self.net.lives:
            fine = life.end in (ORDERLY, "killed")
            self.expect(fine, f"I7: {life.name}/{life.number} ended: {life.end or 'it hangs'}")
            engine = life.parts.engine if life.parts else None
            paused = engine is not None and engine._paused and life.end != "killed"
            self.expect(not paused, f"I7: {life.name}/{life.number} is paused")
        kills = sum(life.end == "killed" for life in self.net.lives)
        self.expect(kills == self._num_deaths, f"I7: {kills} were killed")
        self.expect(not self.net.leaks, f"I7: {self.net.leaks}")

    def _staleness(self) -> None:
        records = {record.version: record for record in self.store.records()}
        handed = {(g.group_id, r.batch.step): g for r in self.batches for g in r.batch.groups}
        for row in self.ledger.groups("trained"):
            assert row.trained_version is not None
            group = handed[row.group_id, row.trained_step or 0]
            for version in group.versions:
                stale = _distance(records, version, row.trained_version)
                within = 0 <= stale <= self.scenario.max_staleness
                self.expect(within, f"I2: group {row.group_id} is {stale} steps stale")
            step = records[row.trained_version].step + 1
            self.expect(step == row.trained_step, f"I2: step {row.trained_step}, not {step}")

    def _conservation(self) -> None:
        rows = self.ledger.groups()
        twice = [k for k, n in Counter((r.prompt_id, r.epoch) for r in rows).items() if n > 1]
        self.expect(not twice, f"I3: issued twice in an epoch: {twice}")
        for row in rows:
            events = [(event.event, event.detail) for event in self.ledger.events(row.group_id)]
            names = [name for name, _ in events]
            self.expect(names.count("trained") <= 1, f"I3: trained twice: {events}")
            self.expect(_is_a_life(names), f"I3: group {row.group_id} went {events}")
            pairs = itertools.pairwise(events)
            torn = any(a == "batched" and b[1] == "stale" for (a, _), b in pairs)
            fenced = self.scenario.victim == TRAINER
            self.expect(fenced or not torn, f"I2: the verdicts on group {row.group_id} differ")
        places = {
            "issued": len(self.table._waiting),
            "claimed": self.table.num_in_flight,
            "finished": self.table.num_queued,
            "batched": len(self.table.batched()),
        }
        counts = self.ledger.counts()
        self.expect(places.items() <= counts.items(), f"I3: {places} and {counts}")
        told = {row.group_id: row.attempt for row in rows if row.state == "trained"}
        for life in self.net.lives:
            if life.name == TRAINER:
                applied = life.parts.backend.applied
                again = len(applied) - len(set(applied))
                self.expect(not again, f"I3: trained twice: {applied}")
                last = life is self.net.newest[TRAINER]
                missing = [key for key in applied[:-1] if last and told.get(key[0]) != key[1]]
                self.expect(not missing, f"I3: trained, and not in the ledger: {missing}")

    def _versions(self) -> None:
        records = self.store.records()
        numbers = [record.version for record in records]
        self.expect(numbers == list(range(len(numbers))), f"I1: numbers {numbers}")
        stamped = {}
        for life in self.net.lives:
            held = [] if life.name != WORKER else life.parts.engine.stamped
            order = [version for version, _ in held]
            self.expect(order == sorted(order), f"I1: an engine held {order}")
            for version, weights in held:
                same = (weights == self.wire.sent[version]).all()
                self.expect(bool(same), f"I4: {life.name} holds other weights than {version}")
                stamped[version] = weights
        for record in records:
            held_by_one = record.state != "live" or record.version in stamped
            self.expect(held_by_one, f"I4: {record} was never held")
            if record.version in self.wire.sent:
                steps = int(self.wire.sent[record.version][0])
                self.expect(steps == record.step, f"I8: {record} has {steps} steps in it")

    def _stamps(self) -> None:
        for ready in self.batches:
            for group in ready.batch.groups:
                try:
                    World.check_group(self, group)  # type: ignore[arg-type]
                except (AssertionError, KeyError) as error:
                    self.problems.append(f"I4: {type(error).__name__} {error}")

    def close(self) -> None:
        """Let go of everything."""
        self.net.close()
        self.store._database.close()
        self.ledger._database.close()


Script = tuple[Any, ...]
"""(script before, event): a path shares its beginning with those that branch off it"""


@dataclass
class Report:
    """What a search has seen."""

    scenario: str
    num_states: int = 0
    num_replays: int = 0
    num_ends: int = 0
    num_left: int = 0
    """branches that were left when it stopped"""
    cpu_s: float = 0.0
    finals: set[str] = field(default_factory=set)
    """what the ledger and the store hold after each path, in words"""
    problems: dict[str, list[Event]] = field(default_factory=dict)
    """each problem, with the first path to it"""

    def __str__(self) -> str:
        text = (
            f"{self.scenario}: {self.num_states} states, {self.num_replays} replays,"
            f" {self.num_ends} ends ({len(self.finals)} different), {self.cpu_s:.1f} s CPU"
        )
        return f"{text}, stopped with {self.num_left} branches left" if self.num_left else text


class Search:
    """A depth-first search of one scenario.

    Args:
        name: of the scenario.
        merge: explore a state once; without, each interleaving is a path of its own.
    """

    def __init__(self, name: str, *, merge: bool = True) -> None:
        self.report = Report(name)
        self._scenario = SCENARIOS[name]
        self._merge = merge
        self._histories: set[int] = set()
        self._states: set[int] = set()
        self._branches: list[tuple[int, Script]] = [(0, ())]

    def run(self, *, within_s: float = 1e9, until_found: bool = False) -> Report:
        """Go on until all is seen, for so many CPU seconds, or until the first problem."""
        report = self.report
        started = time.process_time() - report.cpu_s
        while self._branches and report.cpu_s < within_s:
            history, script = self._branches.pop()
            if not (self._merge and history in self._histories):
                self._replay(script)
            report.cpu_s = time.process_time() - started
            report.num_left = len(self._branches)
            if report.problems and until_found:
                break
        return report

    def _replay(self, script: Script) -> None:
        """Run a script, and go on along the oldest event that leads somewhere new."""
        report = self.report
        report.num_replays += 1
        world = SmallWorld(self._scenario)
        try:
            for event in _events(script):
                world.do(event)
                self._let_silent(world)
            while not self._is_known(world) and not world.problems:
                report.num_states += 1
                new = [(world.histories(event), event) for event in world.enabled()]
                if not new:
                    world.finish()
                    report.num_ends += 1
                    report.finals.add(_final(world))
                    break
                if self._merge:
                    new = [(key, event) for key, event in new if key not in self._histories]
                if not new:
                    break
                self._branches += [(key, (script, event)) for key, event in new[:0:-1]]
                script = (script, new[0][1])
                world.do(new[0][1])
                self._let_silent(world)
            for problem in world.problems:
                report.problems.setdefault(problem, list(_events(script)))
        finally:
            world.close()

    def _is_known(self, world: SmallWorld) -> bool:
        if not self._merge:
            return False
        history = world.histories()
        if history in self._histories:
            return True
        self._histories.add(history)
        state = world.state()
        known = state in self._states
        self._states.add(state)
        return known

    def _let_silent(self, world: SmallWorld) -> None:
        while self._merge and (event := world.silent()) is not None:
            world.net.do(event, note=False)


def _events(script: Script) -> list[Event]:
    events = []
    while script:
        script, event = script
        events.append(event)
    return events[::-1]


_CONSTANT = {
    *("system", "name", "log", "role", "actor_urn", "actor_inbox", "actor_stopped"),
    *("_life", "_actor_ref", "_config", "_group_size", "_synchronous", "_capacity", "_numbers"),
    *("_ledger", "_source", "_wall", "_store", "_run_name", "_started"),
    *("_max_retries", "_max_reissues"),
}
"""Attributes of a registry or a buffer that do not change, or are looked at elsewhere."""


def _frozen(value: Any) -> Any:
    """Return the state of an actor as plain data; whatever is not known here raises."""
    if value is None or isinstance(value, int | str | float | bytes | msgspec.Struct):
        return value
    if isinstance(value, Counter | set):
        return sorted(dict(value).items() if isinstance(value, Counter) else value)
    if isinstance(value, dict):
        return [(_frozen(key), _frozen(one)) for key, one in value.items()]
    if isinstance(value, list | tuple | deque):
        return list(map(_frozen, value))
    ours = type(value).__module__.startswith(("ratchet.actors", "ratchet.staleness"))
    if not ours and not isinstance(value, BufferActor | VersionRegistry):
        raise TypeError(f"{value!r} is part of a state")
    slots = getattr(value, "__slots__", None)
    fields = {slot: getattr(value, slot) for slot in slots} if slots else vars(value)
    return [(name, _frozen(one)) for name, one in fields.items() if name not in _CONSTANT]


def _final(world: SmallWorld) -> str:
    ledger = world.ledger
    groups = [
        (
            r.group_id,
            r.attempt,
            r.staleness,
            [(e.event, e.detail) for e in ledger.events(r.group_id)],
        )
        for r in ledger.groups()
    ]
    versions = [(v.version, v.step, v.parent, v.state) for v in world.store.records()]
    return repr((groups, versions))


def main(names: list[str]) -> int:
    """Explore whole scenarios; return the number of problems."""
    num_problems = 0
    for name in names or SCENARIOS:
        search = Search(name)
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
