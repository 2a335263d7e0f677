"""What must hold in every world, computed from what can be seen from outside the actors.

`Watch` looks at each delivered message (I1 versions only forward, I5 capacity, I6 asks end, credits
are not lost) and at the end of the run (I2 staleness, I3 conservation, I4 stamps, I7 the run ends
well, I8 nothing that is not finite is published, I10 a checkpoint that was whole is there). It
shares no code with what it checks: staleness is computed from the table of versions, places from
the ledger, tokens from the weights sent.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from tests.simulation import batch_marks, counter_checks, evaluation_checks, supervision, trainers
from tests.simulation.faults import Revive
from tests.simulation.links import Links
from tests.simulation.loop import Process, current_process
from tests.simulation.weight_checks import WeightChecks

from ratchet.actors.role import BUFFER, LOST, ORDERLY, REGISTRY
from ratchet.messages import (
    BatchReady,
    ClaimPrompts,
    GroupFailed,
    GroupFinished,
    Message,
    PromptsClaimed,
    VersionCommitted,
    VersionReserved,
    VersionUpdated,
)
from ratchet.storage.ledger import GroupLedger, GroupRow
from ratchet.storage.versions import VersionStore
from ratchet.types import VersionRecord

if TYPE_CHECKING:
    from tests.simulation.draw import Plan
    from tests.simulation.world import Crash, World

_JUDGED_S = 40.0
"""A finish waits for nothing but the registry's word on a version, if the registry is heard."""

_OUTSIDE = ("AskTimeout", "ActorDead", "given up", "lost the registry", "of the engine is lost")
"""Why a worker may end on its own: the world has cut it off, or broken its engine."""

_FENCED = (
    "fenced by term",
    "not the newest",
    "refuses term",
    "waited",
    "taken over",
    "has taken the name",
    "has been replaced",
)
"""How an older trainer may end: told so, or not heard any more."""

_TAKE_OVERS = {"TakeOver", "TakeOverInTransfer", "KillTrainer", "LoseNode"}
"""Faults after which another trainer may go on, from elsewhere."""

_ABORTS = {
    "Sabotage", "Kill", "DoubleStart", "Freeze", "Silence", "TakeOver", "Crash", "BadDisk",
    "TakeOverInTransfer", "KillInTransfer", "FreezeInTransfer", "FailingEngine",
}  # fmt: skip
"""Faults that may end a generation."""

_EVERY = 20
"""Deliveries from one look at all links to the next."""

_OPEN = "SELECT count(*) FROM groups WHERE state IN ('claimed', 'finished')"


class Watch:
    """Looks on while a world runs; `problems` are the invariants that broke, oldest first."""

    def __init__(self, plan: Plan, world: World) -> None:
        self.problems: list[str] = []
        self.broken = asyncio.Event()
        self._loop = world.network.loop
        self._plan = plan
        self._world = world
        config = plan.config
        self._capacity = config.most_open_groups
        self._heard: defaultdict[Process | None, list[tuple[int, int]]] = defaultdict(list)
        self._num_lives = 1
        """of the buffer"""
        self._held: dict[tuple[str, str], int] = {}
        self._num_stamped: Counter[tuple[str, str]] = Counter()
        self._held_versions: set[int] = set()
        self._ended: defaultdict[tuple[str, str], set[tuple[int, int]]] = defaultdict(set)
        self._begun: Counter[tuple[str, str]] = Counter()
        self._begun_before: dict[tuple[str, str, str], int] = {}
        """of each worker, when it first claimed of each life of the buffer"""
        self._promised: set[int] = set()
        self._live: set[int] = set()
        self._claims: dict[int, int] = {}
        self._batched: dict[int, int] = {}
        self._num_seen = 0
        self._links = Links(world.network, exact=not plan.delays_bytes)
        self._weights = WeightChecks(plan, world)
        for fault in plan.faults:
            if fault.kind == "Freeze":
                late = fault.at + self._links.patience_s + world.network.limits.heartbeat_s
                self._loop.call_in(None, late, self._look_at_links)
        self._aborting = {fault.kind for fault in plan.faults} & _ABORTS
        world.network.observers.append(self.observe)
        world.crashes.append(self._crashed)
        world.buffer_says.append(self._not_for_older)

    @property
    def fatal(self) -> bool:
        """Something has struck that ends a run."""
        return any(fault.at <= self._loop.now for fault in self._plan.fatal)

    @property
    def _another_trains(self) -> bool:
        """A trainer may go on from where another was, and not from where that is by then."""
        taken = any(fault.kind in _TAKE_OVERS for fault in self._plan.faults)
        return taken or self._plan.has_standby

    # --- at each delivery

    def observe(self, sender: str, receiver: str, message: Message) -> None:
        """Check what one more message may have changed."""
        match message:
            case VersionUpdated():
                self._only_forward(receiver, message.record)
            case GroupFinished() | GroupFailed():
                self._note_end(message)
            case ClaimPrompts():
                key = message.worker, message.incarnation
                self._credit_is_kept(key, message)
                self._engines_only_forward()
                self._expect(key in self._held, "I4", f"{key} asks for prompts before weights")
            case PromptsClaimed():
                self._begun[receiver, message.incarnation] += len(message.assignments)
                self._note_claims(message)
            case BatchReady():
                self._batched.update((g.group_id, g.attempt) for g in message.batch.groups)
            case VersionReserved():
                self._promised.add(message.version)
            case VersionCommitted():
                self._live.add(message.version)
            case _:
                pass
        for problem in (*self._weights.told(message), *self._weights.check()):
            self._expect(False, *problem)
        if receiver == BUFFER:
            (num_open,) = self._world.ledger._sql.execute(_OPEN).fetchone()
            self._expect(num_open <= self._capacity, "I5", f"{num_open} groups are open")
        self._engines_only_forward()
        self._waits_end()
        self._num_seen += 1
        if self._num_seen % _EVERY == 0:
            self._look_at_links()

    def _look_at_links(self) -> None:
        for problem in self._links.check():
            self._expect(False, *problem)

    def _expect(self, holds: bool, invariant: str, detail: str) -> None:
        if not holds:
            now = self._loop.now
            self.problems.append(f"{invariant}: {detail} (at {now:.3f} s)")
            self.broken.set()

    def _only_forward(self, receiver: str, record: VersionRecord) -> None:
        heard = self._heard[current_process.get()]  # this life of the receiver
        last = heard[-1] if heard else (0, -1)
        new = record.term, record.version
        forward = new[0] >= last[0] and new[1] > last[1]
        self._expect(forward, "I1", f"{receiver} heard {last}, then {new}")
        heard.append(new)

    def _note_end(self, message: GroupFinished | GroupFailed) -> None:
        group = (
            (message.group.group_id, message.group.attempt)
            if isinstance(message, GroupFinished)
            else (message.group_id, message.attempt)
        )
        self._ended[message.worker, message.incarnation].add(group)
        if isinstance(message, GroupFailed) and message.reason == "generation":
            self._expect(bool(self._aborting), "I4", f"aborted for nothing: {message.detail}")
        if isinstance(message, GroupFinished):
            self._by_the_buffers_clock(_JUDGED_S + self._plan.unheard_s, self._is_judged, *group)

    def _credit_is_kept(self, key: tuple[str, str], claim: ClaimPrompts) -> None:
        """A worker has all its slots again for what it has said to have ended; a life of the buffer
        knows nothing of what began before it.
        """
        before = self._begun_before.setdefault((*key, claim.buffer), self._begun[key])
        slots, ended = self._plan.config.groups_per_worker, len(self._ended[key])
        least = slots + ended - before
        told = f"{claim.credit} < {slots} + {ended} - {before}"
        self._expect(claim.credit >= least, "I7", f"{key} has lost credit: {told}")

    def _not_for_older(self, term: int, newest: int) -> None:
        """The buffer has heard of no newer trainer when it answers an older one."""
        self._expect(term >= newest, "I1", f"term {term} is served after {newest}")

    def _note_claims(self, message: PromptsClaimed) -> None:
        for assignment in message.assignments:
            self._claims[assignment.group_id] = assignment.attempt
            self._by_the_buffers_clock(
                assignment.lease_s + 1.0, self._lease_ended, assignment.group_id, assignment.attempt
            )

    def _by_the_buffers_clock(
        self, delay_s: float, check: Callable[[int, int], None], *group: int
    ) -> None:
        """Check what the buffer must have done by then, if it was let."""
        buffer = self._world.network.hosts[BUFFER].process
        buffer.call(self._loop.call_later, delay_s, check, *group)

    def _lease_ended(self, group_id: int, attempt: int) -> None:
        row = self._world.ledger.group(group_id)
        held = row is not None and (row.state, row.attempt) == ("claimed", attempt)
        gone = self._world.ends[BUFFER].event.is_set()
        if held and self._world.network.hosts[BUFFER].thawed_at == self._loop.now:
            self._by_the_buffers_clock(1.0, self._lease_ended, group_id, attempt)
            return  # it goes on just now, and is about to look at its leases
        self._expect(gone or not held, "I6", f"group {group_id} is held past its lease")

    def _is_judged(self, group_id: int, attempt: int) -> None:
        row = self._world.ledger.group(group_id)
        waits = row is not None and (row.state, row.attempt) == ("claimed", attempt)
        # without a registry the buffer waits for its next life, and ends if none comes
        ends = self._world.ended, self._world.ends[BUFFER], self._world.ends[REGISTRY]
        ended = any(end.event.is_set() for end in ends)
        self._expect(ended or not waits, "I3", f"the finish of group {group_id} was forgotten")

    def _engines_only_forward(self) -> None:
        for worker in self._world.lives:
            key = worker.name, worker.incarnation
            stamped = worker.engine.stamped
            if len(stamped) == self._num_stamped[key]:
                continue
            for version, weights in stamped[self._num_stamped[key] :]:
                last = self._held.get(key, -1)
                self._expect(version >= last, "I1", f"{key} went from version {last} to {version}")
                sent = self._world.wire.sent.get(version)
                same = sent is not None and np.array_equal(sent, weights)
                self._expect(same, "I4", f"{key} is stamped {version} and holds other weights")
                self._held[key] = version
                self._held_versions.add(version)
            self._num_stamped[key] = len(stamped)

    def _waits_end(self) -> None:
        now = self._loop.now
        for name, host in self._world.network.living().items():
            if not host.process.runs or host.thawed_at == now:  # it is about to look at the time
                continue
            local = host.process.local(now)
            for wait in host.system.waits.rows():
                self._expect(wait.until >= local - 1e-3, "I6", f"{name} waits too long: {wait}")

    # --- at the end

    def _crashed(self, crash: Crash) -> None:
        """What others were told is on the disk, and the disk makes sense."""
        self._num_lives += crash.name == BUFFER
        store = VersionStore.open(crash.versions)
        records = {record.version: record for record in store.records()}
        self._expect(self._promised <= records.keys(), "I1", "a reserved number was lost")
        lost = {v for v in self._live if v not in records or records[v].state != "live"}
        self._expect(not lost, "I1", f"commits of {lost} were lost")
        term = store.acquire_term("next", "next", 0.0)
        number = store.reserve(term, 10**6, max(records, default=None), 0.0)
        self._expect(number not in self._promised, "I1", f"{number} is given again")
        store.close()
        ledger = GroupLedger.open(crash.ledger)
        rows = {row.group_id: row for row in ledger.groups()}
        for row in rows.values():
            life = ledger.events(row.group_id)
            events = [_LOST if event.detail == _LOST else event.event for event in life]
            self._expect(_is_a_life(events), "I3", f"on disk {row.group_id} went {events}")
        cursor = ledger.load_cursor()
        issued = sum(row.epoch == cursor.epoch for row in rows.values())
        self._expect(issued == cursor.position, "I3", f"{cursor} on disk, {issued} issued")
        if not crash.power:
            self._on_disk(rows, self._claims, {"issued"})
            self._on_disk(rows, self._batched, {"issued", "claimed"})
        ledger.close()

    def _on_disk(self, rows: dict[int, GroupRow], told: dict[int, int], before: set[str]) -> None:
        for group_id, attempt in told.items():
            row = rows.get(group_id)
            later = row is not None and row.attempt > attempt
            there = row is not None and row.attempt == attempt and row.state not in before
            self._expect(later or there, "I3", f"group {group_id}/{attempt} on disk: {row}")

    def finish(self) -> None:
        """Check what can only be said of a whole run."""
        self._engines_only_forward()
        for problem in self._weights.at_end():
            self._expect(False, *problem)
        for problem in supervision.check(self._world, heard=not (self.fatal or self._plan.blinds)):
            self._expect(False, "I7", problem)
        if self.fatal:
            self._everyone_left()
            self._staleness()
            self._stamps()
            self._publications()
            return
        for check in (
            self._run_ended_well,
            self._nothing_crashed,
            self._staleness,
            self._conservation,
            self._stamps,
            self._publications,
            self._evaluations,
            self._marks,
            self._counters,
            self._nobody_is_paused,
        ):
            try:
                check()
            except Exception as error:  # noqa: BLE001 - a check that cannot be made is a finding
                self.problems.append(f"{check.__name__}: {type(error).__name__}: {error}")

    def _run_ended_well(self) -> None:
        world, plan = self._world, self._plan
        if not world.ended.event.is_set():
            self._expect(world.told_of_end, "I7", "the run did not end")
            return
        summaries = world.output.summaries
        if (supervision.ended_the_run(world) or world.over) and len(summaries) <= 1:
            return
        self._expect(len(summaries) == 1, "I7", f"summaries: {summaries}")
        status, reason = summaries[-1]["status"], str(summaries[-1]["reason"])
        if status == "failed":
            allowed = any(text in reason for text in plan.may_fail)
            allowed = allowed or ("waited" in reason and supervision.nobody_left(world))
            self._expect(allowed, "I7", f"the run failed: {reason}")
        elif status == "stopped":
            self._expect(reason == "enough", "I7", f"stopped: {reason}")
        else:
            steps = summaries[-1]["steps"]
            self._expect(steps == plan.config.trainer.num_steps, "I7", f"{steps} steps")
        for trainer in world.trainers:
            for summary in trainer.output.summaries if trainer is not world.leader else ():
                fenced = any(word in str(summary["reason"]) for word in _FENCED)
                # one that is out of reach for longer ends no run that has a standby
                fenced |= plan.has_standby and LOST in str(summary["reason"])
                fine = fenced or summary["status"] in {"finished", "stopped"}
                fine = fine or any(text in str(summary["reason"]) for text in plan.may_fail)
                self._expect(fine, "I7", f"an old trainer: {summary}")

    def _everyone_left(self) -> None:
        """Without a registry no role goes on."""
        if self._world.network.alive(REGISTRY) or self._plan.blinds:
            return
        # a worker is started again and again, and waits for a registry each time
        again = ("rollout", "evaluator", "launcher", *(["trainer"] if self._plan.save_s else []))
        left = [name for name in self._world.network.living() if not name.startswith(again)]
        self._expect(not left, "I7", f"the registry is gone, and {left} go on")

    def _nothing_crashed(self) -> None:
        for name in (REGISTRY, BUFFER):
            end = self._world.ends[name]
            in_order = end.reason == ORDERLY and end.host.system.run_ended is not None
            revived = {fault.name for fault in self._plan.faults if isinstance(fault, Revive)}
            is_down = end.reason == "killed" and name in revived  # and the run did not wait
            fine = in_order or is_down or not end.event.is_set()
            if name == BUFFER and self._world.over:
                # the registry may have ended before this life of the buffer came to it, or heard
                joined = self._world.network.hosts[REGISTRY].log.named("role_joined")
                unheard = end.host.incarnation not in {fields["life"] for fields in joined}
                unheard = unheard or self._plan.blinds
                fine = fine or (LOST in end.reason and unheard)
            self._expect(fine, "I7", f"{name} ended: {end.reason}")
        for name, reason in self._world.lost_workers:
            # a worker that cannot reach the registry, or was given up, starts again
            self._expect(
                any(word in reason for word in _OUTSIDE),
                "I7",
                f"{name} ended: {reason}",
            )

    def _staleness(self) -> None:
        records = {record.version: record for record in self._world.store.records()}
        accepted = list(self._world.ledger.groups("trained"))
        trained: dict[tuple[int, int], set[int]] = {}
        for trainer in self._world.trainers:
            trained |= trainer.backend.trained_versions
        bound = self._plan.config.buffer.max_staleness
        # the tokens of an earlier trainer are of another branch, whatever was admitted
        unbroken = not self._another_trains
        for row in accepted:
            assert row.trained_version is not None
            for version in trained[row.group_id, row.attempt]:
                stale = _distance(records, version, row.trained_version)
                self._expect(
                    0 <= stale <= bound,
                    "I2",
                    f"group {row.group_id} with tokens of {version} was trained by"
                    f" {row.trained_version}: {stale} steps apart, at most {bound} allowed",
                )
                if self._plan.config.trainer.synchronous and unbroken:
                    self._expect(stale == 0, "I2", f"synchronous, and {stale} steps stale")
            step = records[row.trained_version].step + 1
            self._expect(step == row.trained_step, "I2", f"step {row.trained_step}, not {step}")
        if unbroken and self._plan.config.buffer.admission == "bounded":
            self._nothing_was_stale()

    def _nothing_was_stale(self) -> None:
        for row in self._world.ledger.groups():
            events = self._world.ledger.events(row.group_id)
            stale = [event for event in events if event.detail == "stale"]
            self._expect(not stale, "I2", f"bounded, and group {row.group_id} was too old: {stale}")

    def _conservation(self) -> None:
        ledger = self._world.ledger
        rows = ledger.groups()
        keys = Counter((row.prompt_id, row.epoch) for row in rows)
        twice = [key for key, count in keys.items() if count > 1]
        self._expect(not twice, "I3", f"issued twice in an epoch: {twice}")
        for row in rows:
            life = ledger.events(row.group_id)
            events = [_LOST if e.detail == _LOST else e.event for e in life]
            trained = events.count("trained") - events.count(_LOST)
            self._expect(trained <= 1, "I3", f"{row.group_id}: {events}")
            self._expect(_is_a_life(events), "I3", f"group {row.group_id} went {events}")
        budget = self._plan.config.buffer
        retries = 0 if budget.unused in {"drop", "mask"} else budget.max_retries
        taken_over = self._another_trains
        for row in rows:
            details = [event.detail for event in ledger.events(row.group_id)]
            lost, deaths = details.count(_LOST), details.count("buffer_died")
            again = (row.retries, row.attempt - row.retries - lost - deaths)
            # the budget of reissues is that of one life of the buffer, and of one training
            within = again[0] <= retries
            within = within and again[1] <= budget.max_reissues * (self._num_lives + lost)
            self._expect(within, "I3", f"{row.group_id}: (retries, reissues) {again}")
            events = [(event.event, event.detail) for event in ledger.events(row.group_id)]
            torn = any(a[0] == "batched" and b[1] == "stale" for a, b in itertools.pairwise(events))
            self._expect(taken_over or not torn, "I2", f"the verdicts on {row.group_id} differ")
            handled = [d for event, d in events if event in {"retried", "masked"} and d]
            filtered = any(detail.startswith("filter:") for detail in handled)
            self._expect(not filtered, "I3", f"{row.group_id} was filtered, and went on: {events}")
        handed = {(g.group_id, g.attempt) for r in self._world.batches for g in r.batch.groups}
        table = self._world.buffer._table
        states = ledger.counts()
        places = {
            "issued": len(table.waiting) + len(table.stored),
            "claimed": len(table.in_flight),
            "finished": table.num_queued,
            "batched": len(table.batched()),
        }
        for state, count in places.items():
            self._expect(states[state] == count, "I3", f"{state}: {states[state]} != {count}")
        open_now = places["claimed"] + places["finished"]
        self._expect(open_now <= self._capacity, "I5", f"{open_now} groups are open at the end")
        for row in ledger.groups("trained"):
            self._expect((row.group_id, row.attempt) in handed, "I3", f"{row} was never handed out")
        self._trained_once()

    def _trained_once(self) -> None:
        """What the models were trained on, term by term, is what the ledger says."""
        for trainer in self._world.trainers:
            counts = Counter(trainer.backend.applied)
            again = [key for key, count in counts.items() if count > 1]
            self._expect(not again, "I3", f"{trainer.name} trained twice: {again}")
        newest = set(self._world.backend.applied)
        last = set(self._world.backend.applied[-self._plan.config.buffer.batch_groups :])
        rows = self._world.ledger.groups("trained", "committed")
        told = {row.group_id: row.attempt for row in rows}
        missing = {key for key in newest - last if told.get(key[0]) != key[1]}
        self._expect(not missing, "I3", f"trained, and the ledger does not know: {missing}")
        if self._world.checkpoints is not None:
            robbed = [trainer.name for trainer in self._world.trainers if trainer.robbed]
            self._expect(not robbed, "I10", f"no checkpoint is there for {robbed}")
            for problem in trainers.check(self._world):
                self._expect(False, "I3", problem)

    def _stamps(self) -> None:
        for ready in self._world.batches:
            for group in ready.batch.groups:
                size = self._plan.config.rollout.group_size
                self._expect(len(group.trajectories) == size, "I4", f"{group.group_id} is torn")
                failed = [r for r in group.rollouts if r.finish_reason in {"abort", "error"}]
                used = any(1 in rollout.loss_mask.data for rollout in failed)
                self._expect(not used, "I3", f"{group.group_id} trains what was aborted")
                try:
                    self._world.check_group(group)
                except (AssertionError, KeyError) as error:
                    self._expect(False, "I4", f"{type(error).__name__} {error}")

    def _publications(self) -> None:
        """Weights are finite, each version has the weights of its step, numbers are not reused."""
        records = self._world.store.records()
        numbers = [record.version for record in records]
        self._expect(numbers == list(range(len(numbers))), "I1", f"numbers {numbers}")
        for record in records:
            weights = self._world.wire.sent.get(record.version)
            if weights is None:
                self._expect(record.state != "live", "I4", f"{record} is live and was never sent")
                continue
            held = record.version in self._held_versions
            self._expect(record.state != "live" or held, "I4", f"no engine ever held {record}")
            self._expect(bool(np.isfinite(weights).all()), "I8", f"{record.version} is not finite")
            self._expect(
                int(weights[0]) == record.step,
                "I8",
                f"version {record.version} of step {record.step} has {int(weights[0])} steps in it",
            )

    def _evaluations(self) -> None:
        """A result is of one version."""
        for problem in evaluation_checks.check(self._world):
            self._expect(False, "I4", problem)

    def _counters(self) -> None:
        for problem in counter_checks.check(self._world.buffer):
            self._expect(False, "I3", problem)

    def _marks(self) -> None:
        """What the batch filter has marked is not trained."""
        for problem in batch_marks.check(self._world):
            self._expect(False, "I2", problem)

    def _nobody_is_paused(self) -> None:
        for worker in self._world.workers.values():
            alive = worker.host.lives
            loading = any(
                task.get_name().startswith(f"{worker.name}.load-") for task in asyncio.all_tasks()
            )
            self._expect(
                not (alive and worker.engine._paused and not loading), "I7", f"{worker.name} paused"
            )


def _distance(records: dict[int, VersionRecord], token: int, trainer: int) -> int:
    """Optimiser steps from one version to another through the tree."""

    def line(version: int) -> list[int]:
        path = []
        node: int | None = version
        while node is not None:
            path.append(node)
            node = records[node].parent
        return path

    above = set(line(trainer))
    meet = next((version for version in line(token) if version in above), None)
    if meet is None:
        return 10**9
    return records[token].step + records[trainer].step - 2 * records[meet].step


_LOST = "step_lost"
"""the weights that were trained on it are gone, and a new trainer was not"""
_NEXT = {
    "issued": {"claimed"},
    "claimed": {"finished", "retried", "dropped"},
    "finished": {"masked", "batched", "retried", "dropped"},
    "masked": {"masked", "batched", "retried", "dropped"},
    "batched": {"trained", "retried", "dropped"},
    "requeued": {"masked", "batched", "retried", "dropped"},
    "retried": {"claimed", "requeued"},
    "trained": {_LOST, "committed"},
    "committed": {_LOST},
    _LOST: {"claimed", "requeued"},
    "dropped": set(),
}


def _is_a_life(events: list[str]) -> bool:
    if not events or events[0] != "issued":
        return False
    return all(b in _NEXT[a] for a, b in itertools.pairwise(events))
