"""What must hold in every world, computed from what can be seen from outside the actors.

`Watch` looks at each delivered message (I1 versions only forward, I5 capacity, I6 asks end, credits
are not lost), at the disk after each crash (`crash_checks`) and at the end of the run
(`end_checks`). It shares no code with what it checks: staleness is computed from the table of
versions, places from the ledger, tokens from the weights sent.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from tests.simulation.crash_checks import CrashChecks
from tests.simulation.end_checks import EndChecks
from tests.simulation.links import Links
from tests.simulation.loop import Process, current_process
from tests.simulation.weight_checks import WeightChecks

from ratchet.actors.role import BUFFER, REGISTRY
from ratchet.messages import (
    ClaimPrompts,
    GroupFailed,
    GroupFinished,
    Message,
    PromptsClaimed,
    VersionUpdated,
)
from ratchet.types import VersionRecord

if TYPE_CHECKING:
    from tests.simulation.plan import Plan
    from tests.simulation.world import World

_JUDGED_S = 40.0
"""A finish waits for nothing but the registry's word on a version, if the registry is heard."""

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
        self._held: dict[tuple[str, str], int] = {}
        self._num_stamped: Counter[tuple[str, str]] = Counter()
        self._held_versions: set[int] = set()
        self._ended: defaultdict[tuple[str, str], set[tuple[int, int]]] = defaultdict(set)
        self._begun: Counter[tuple[str, str]] = Counter()
        self._begun_before: dict[tuple[str, str, str], int] = {}
        """of each worker, when it first claimed of each life of the buffer"""
        self._num_seen = 0
        self._links = Links(world.network, exact=not plan.delays_bytes)
        self._weights = WeightChecks(plan, world)
        self._crashes = CrashChecks(self._expect)
        for fault in plan.faults:
            if fault.kind == "Freeze":
                late = fault.at + self._links.patience_s + world.network.limits.heartbeat_s
                self._loop.call_in(None, late, self._look_at_links)
        self._aborting = {fault.kind for fault in plan.faults} & _ABORTS
        world.network.observers.append(self.observe)
        world.crashes.append(self._crashes.look)
        world.buffer_says.append(self._not_for_older)

    @property
    def fatal(self) -> bool:
        """Something has struck that ends a run."""
        return any(fault.at <= self._loop.now for fault in self._plan.fatal)

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
            case _:
                pass
        self._crashes.told(message)
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

    def finish(self) -> None:
        """Check what can only be said of a whole run."""
        self._engines_only_forward()
        for problem in self._weights.at_end():
            self._expect(False, *problem)
        checks = EndChecks(
            self._plan,
            self._world,
            self._expect,
            held_versions=self._held_versions,
            num_lives=self._crashes.num_lives,
        )
        checks.check(fatal=self.fatal)
