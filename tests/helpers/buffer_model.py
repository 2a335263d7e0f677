"""What the buffer must do, said again and more simply: a model to compare the real one with.

It shares no code with the buffer: groups lie in one dict, distances are walked in the table of
versions, nothing is cached or indexed. Where the contract leaves an order open (several groups
given up at the same moment), any order will do. `heard` takes a message that the buffer was told
and all that the buffer then told others, and raises AssertionError where the two differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.helpers.driven_buffer import LIFE, DrivenBuffer, assignments

from ratchet.actors.buffer import CheckLeases
from ratchet.config import Config
from ratchet.messages import (
    BatchReady,
    ClaimPrompts,
    GroupFailed,
    GroupFinished,
    LineageDescribed,
    Message,
    RequestBatch,
    RoleLeft,
    StepTrained,
    VersionUpdated,
)
from ratchet.staleness import Position
from ratchet.types import Assignment, RolloutGroup, VersionRecord

STATES = {"waiting": "issued", "flight": "claimed", "queued": "finished"}
"""by what the ledger calls it, where that is another word"""


@dataclass
class Group:
    """One prompt group, wherever it is."""

    place: str = "waiting"
    attempt: int = 0
    retries: int = 0
    reissues: int = 0
    holder: tuple[str, str] = ("", "")
    base: int = 0
    lease_end: float = 0.0
    group: RolloutGroup | None = None
    reason: str | None = None
    trained: tuple[int, int] | None = None
    """(version that took the step, step)"""

    @property
    def num_bytes(self) -> int:
        """An int32 a prompt token; an int32, a float32 and a byte a completion token."""
        rollouts = self.group.rollouts if self.group else ()
        return sum(4 * len(r.prompt_ids) + 9 * len(r.completion_ids) for r in rollouts)


@dataclass
class Account:
    """The credit of one life of a worker."""

    incarnation: str
    total: int = 0
    used: int = 0
    version: int = 0
    lapsed: set[tuple[int, int]] = field(default_factory=set)
    """(group, attempt) whose leases have ended, and which have not come to their end"""


class BufferModel:
    """The state of a buffer, and what it must say next."""

    def __init__(self, config: Config, first: VersionRecord) -> None:
        self.config = config.buffer
        self.is_bounded = config.buffer.admission == "bounded"
        self.group_size = config.rollout.group_size
        self.groups: dict[int, Group] = {}
        self.waiting: list[set[int]] = []  # what was given up at one moment is in any order
        self.queue: list[int] = []
        self.largest = 0
        self.accounts: dict[str, Account] = {}
        self.closed: set[tuple[str, str]] = set()
        self.known = {first.version: first}
        self.parked: list[GroupFinished] = []
        self.judged: Position | None = None
        self.next = (first.term, Position(first.version, first.step))
        self.term, self.settled = first.term, 0
        self.request: RequestBatch | None = None
        self.handed: tuple[RequestBatch, list[int]] | None = None
        self.again: BatchReady | None = None
        self.unbroken = True
        """there has been one trainer"""

    # --- what is told to both

    def heard(self, message: object, told: list[tuple[str, Message]], now: float) -> None:
        """Take a message, and compare what followed from it."""
        resent = None
        match message:
            case ClaimPrompts():
                self._claim(message)
            case GroupFinished():
                self._finish(message)
            case GroupFailed():
                key = message.worker, message.incarnation
                if group := self._held(key, message.group_id, message.attempt):
                    self._unused(message.group_id, group, message.reason, left=False)
            case VersionUpdated():
                self._published(message.record)
            case LineageDescribed():
                self.known |= {record.version: record for record in message.versions}
                parked, self.parked = self.parked, []
                for finish in parked:
                    self._finish(finish)
            case RequestBatch():
                resent = self._take(message)
            case StepTrained():
                self._trained(message)
            case RoleLeft():
                self._left((message.role.name, message.role.incarnation))
            case CheckLeases():
                self._end_leases(now)
            case _:
                pass
        batches = [m for _, m in told if isinstance(m, BatchReady)]
        if resent is not None:
            assert batches == [resent], "the same request gets the same batch"
            batches = []
        self._serve(batches)
        self._issue(assignments(told), now)

    def _claim(self, message: ClaimPrompts) -> None:
        key = message.worker, message.incarnation
        if key in self.closed or message.buffer != LIFE:
            return
        account = self.accounts.get(message.worker)
        if account is None or account.incarnation != message.incarnation:
            account = self.accounts[message.worker] = Account(message.incarnation)
        account.total = max(account.total, message.credit)
        account.version = max(account.version, message.version if self.is_bounded else 0)

    def _held(self, holder: tuple[str, str], group_id: int, attempt: int) -> Group | None:
        """The group, if it is in flight there; else its end is late, and gives nothing but word
        that a credit, given back when the lease ended, is used after all.
        """
        group = self.groups[group_id]
        if (group.place, group.holder, group.attempt) == ("flight", holder, attempt):
            return group
        account = self.accounts.get(holder[0])
        if account is not None and account.incarnation == holder[1]:
            account.used += (group_id, attempt) in account.lapsed
            account.lapsed.discard((group_id, attempt))
        return None

    def _finish(self, message: GroupFinished) -> None:
        made = message.group
        key = message.worker, message.incarnation
        group = self._held(key, made.group_id, made.attempt)
        if group is None:
            return
        if not self.knows(*made.versions):
            self.parked.append(message)
            return
        group.place, group.group, group.reason = "queued", made, None
        self.queue.append(made.group_id)
        self.largest = max(self.largest, group.num_bytes)
        self._judge_finish(made.group_id, group)
        # a token newer than the position: that position is out of date, and says nothing
        in_date = self.judged is not None and max(made.versions) <= self.judged.version
        if group.place == "queued" and in_date:
            self._judge(made.group_id, group)

    def _published(self, record: VersionRecord) -> None:
        self.known[record.version] = record
        self.term = max(self.term, record.term)  # an older trainer may not ask any more
        if self.request is not None and self.request.term < self.term:
            self.request = None
        position = Position(record.version, record.step)
        if (record.term, record.step) >= (self.next[0], self.next[1].step):
            self.next = record.term, position
        if self.knows(record.version) and (self.judged is None or position > self.judged):
            self._judge_all(position)

    def _left(self, key: tuple[str, str]) -> None:
        self.closed.add(key)
        account = self.accounts.get(key[0])
        if account is not None and account.incarnation == key[1]:
            del self.accounts[key[0]]
        self._give_up(i for i, g in self.groups.items() if (g.place, g.holder) == ("flight", key))

    def _end_leases(self, now: float) -> None:
        over = [i for i, g in self.groups.items() if g.place == "flight" and g.lease_end <= now]
        for group_id in over:
            group = self.groups[group_id]
            account = self.accounts.get(group.holder[0])
            if account is not None and account.incarnation == group.holder[1]:
                account.used -= 1
                account.lapsed.add((group_id, group.attempt))
        self._give_up(over, "lease_expired")

    # --- batches

    def _take(self, message: RequestBatch) -> BatchReady | None:
        if message.term < self.term:
            return None
        self.term = message.term
        if message.done is not None:
            self._trained(message.done)
        if self.handed is not None:
            before, ids = self.handed
            if (message.term, message.step) == (before.term, before.step):
                return self.again
            self.handed = None
            self._give_up(ids, "trainer_died")
        self.request = message
        self.next = message.term, Position(message.version, message.step)
        if self.knows(message.version):
            self._judge_all(self.next[1])
        return None

    def _trained(self, message: StepTrained) -> None:
        if self.handed is None:
            return
        request, ids = self.handed
        if request.term != message.term or {*ids} != {*message.trained, *message.rejected}:
            return
        if message.attempts != {i: self.groups[i].attempt for i in ids}:
            return
        self.handed = None
        for group_id in message.trained:
            group = self.groups[group_id]
            group.place, group.trained = "trained", (request.version, message.step)
        for group_id, reason in message.rejected.items():
            group = self.groups[group_id]
            if reason.startswith("filter:"):
                self._drop(group_id, group, reason)
            else:
                self._unused(group_id, group, reason, left=False)

    def _serve(self, batches: list[BatchReady]) -> None:
        request = self.request
        size = self.config.batch_groups
        if request is None or not self.knows(request.version):
            assert not batches, "nobody has asked for a batch"
            return
        if request.term > self.settled:
            self.settled = request.term
            self._lose(request)
        position = Position(request.version, request.step)
        if len(self.queue) >= size:
            self._judge_all(position)
        ids = self._batch(position)
        if ids is None:
            assert not batches, "there is no batch that is fresh, and leaves none that will not be"
            return
        (ready,) = batches
        assert [g.group_id for g in ready.batch.groups] == ids, "first in, first out by finish"
        self.queue = [i for i in self.queue if i not in ids]
        assert (ready.term, ready.batch.step) == (request.term, request.step + 1)
        for given, age in zip(ready.batch.groups, ready.stats.staleness, strict=True):
            group = self.groups[given.group_id]
            group.place = "batched"
            assert given.attempt == group.attempt
            assert len(given.rollouts) == self.group_size, "a group is torn"
            ages = self._ages(given, position)
            assert age <= self.config.max_staleness
            assert group.reason is not None or (given == group.group and age == max(ages.values()))
        bytes_left = sum(self.groups[i].num_bytes for i in self.queue)
        assert (ready.stats.queue_groups, ready.stats.queue_bytes) == (len(self.queue), bytes_left)
        self.request, self.again = None, ready
        self.handed = request, ids
        self.next = request.term, Position(request.version, request.step + 1)

    def _batch(self, position: Position) -> list[int] | None:
        """The first to finish; if bounded, of those batches after which all that is open can still
        be trained in time.
        """
        size, bound = self.config.batch_groups, self.config.max_staleness
        if len(self.queue) < size:
            return None
        if not self.is_bounded:
            return self.queue[:size]
        flight = {i: g.base for i, g in self.groups.items() if g.place == "flight"}
        if not self.knows(*flight.values()):
            return None
        ages = {i: self._distance(base, position) for i, base in flight.items()}
        ages = {i: age for i, age in ages.items() if age <= bound}  # else it is lost already
        for i in self.queue:
            group = self.groups[i].group
            assert group is not None
            ages[i] = min(bound, max(self._ages(group, position).values()))
        for ids in itertools.combinations(self.queue, size):
            left = [ages[i] for i in ages if i not in ids]
            if all(
                sum(each >= age for each in left) <= size * (bound - age)
                or all(ages[i] >= age for i in ids)  # more cannot be done
                for age in range(bound + 1)
            ):
                return list(ids)
        return None

    def _lose(self, request: RequestBatch) -> None:
        path = [r.version for r in self._path(request.version)]
        lost = [
            group_id
            for group_id, group in self.groups.items()
            if group.place == "trained"
            and group.trained is not None
            and (group.trained[1] > request.step or group.trained[0] not in path)
        ]
        for group_id in lost:
            self.groups[group_id].reissues = 0
            self.groups[group_id].trained = None
        self._to_wait(lost, "step_lost")

    # --- issue

    def _issue(self, claimed: list[tuple[str, str, Assignment]], now: float) -> None:
        given = {a.group_id: ((worker, life), a) for worker, life, a in claimed}
        assert len(given) == len(claimed)
        while given:
            if self.waiting:
                # in any order among themselves, but to the newest weights first
                going = sorted(i for i in self.waiting[0] if i in given)
                group_id = max(going, key=lambda i: self._version_at(given[i][0]), default=None)
                assert group_id is not None, f"{self.waiting[0]} waits, and {given} go out"
                self.waiting[0].remove(group_id)
                self.waiting = [each for each in self.waiting if each]
            else:
                group_id = len(self.groups)
                assert group_id in given, f"{given} instead of group {group_id}"
                self.groups[group_id] = Group()
            key, assignment = given.pop(group_id)
            self._hand(self.groups[group_id], key, assignment, now)
        for worker, account in self.accounts.items():
            idle = account.used < account.total and self.has_room(account.version)
            assert not idle, f"{worker} has credit, there is room, and nothing goes out"

    def _version_at(self, key: tuple[str, str]) -> int:
        return self.accounts[key[0]].version

    def _hand(self, group: Group, key: tuple[str, str], assignment: Assignment, now: float) -> None:
        account = self.accounts[key[0]]
        assert (group.place, group.attempt) == ("waiting", assignment.attempt)
        assert account.incarnation == key[1]
        assert account.used < account.total, f"{key} has no credit left"
        assert self.has_room(account.version), "there is no room"
        newer = [a for a in self.accounts.values() if a.version > account.version]
        waits = [a for a in newer if a.used < a.total and self.has_room(a.version)]
        assert not waits, "one with newer weights waits"
        account.used += 1
        group.place, group.holder, group.base = "flight", key, account.version
        group.lease_end = now + self.config.lease_s

    def has_room(self, version: int) -> bool:
        """Whether one more group may be open, of a worker that holds a version."""
        flight = [g for g in self.groups.values() if g.place == "flight"]
        num_open = len(flight) + len(self.queue) + 1
        config = self.config
        if num_open > config.capacity:
            return False
        if config.max_bytes is not None and num_open > config.batch_groups:
            size = sum(self.groups[i].num_bytes for i in self.queue)
            size += (len(flight) + 1) * self.largest
            if not self.largest or size > config.max_bytes:
                return False
        if not self.is_bounded:
            return True
        position = self.next[1]
        if not self.knows(position.version, version):
            return False
        age = self._distance(version, position)
        if age > config.max_staleness:
            return False
        # what is trained into versions that the worker does not have yet keeps its place
        kept = config.batch_groups * age
        within = config.batch_groups * (config.max_staleness + 1)
        return num_open <= max(config.batch_groups, min(config.capacity, within) - kept)

    # --- verdicts

    def _judge_finish(self, group_id: int, group: Group) -> None:
        assert group.group is not None
        rollouts = group.group.rollouts
        whole = [r for r in rollouts if r.finish_reason not in {"abort", "error"}]
        if len(whole) < len(rollouts):
            aborted = any(r.finish_reason == "abort" for r in rollouts)
            self._unused(group_id, group, "aborted" if aborted else "generation", bool(whole))
            if group.place != "queued":
                return
        filters = self.config.filters
        if "any_aborted" in filters and len(whole) < len(rollouts):
            self._drop(group_id, group, "filter:any_aborted")
        elif "zero_spread" in filters and len({r.reward for r in whole}) < 2:
            self._drop(group_id, group, "filter:zero_spread")

    def _judge_all(self, position: Position) -> None:
        self.judged = position
        before = len(self.waiting)
        for group_id in list(self.queue):
            self._judge(group_id, self.groups[group_id])
        together = set().union(*self.waiting[before:])
        self.waiting[before:] = [together] if together else []

    def _judge(self, group_id: int, group: Group) -> None:
        assert group.group is not None
        assert self.judged is not None
        bound = self.config.max_staleness
        ages = self._ages(group.group, self.judged)
        if max(ages.values()) <= bound:
            return
        assert not (self.is_bounded and self.unbroken), f"bounded, and {group_id} is stale"
        left = any(
            ages[span.version] <= bound
            for r in group.group.rollouts
            if r.finish_reason not in {"abort", "error"}
            for span in r.spans
        )
        if not (left and group.reason == "stale"):
            self._unused(group_id, group, "stale", left)

    def _unused(self, group_id: int, group: Group, reason: str, left: bool) -> None:
        """The handler's word: `buffer.unused`, within its budget."""
        unused = self.config.unused
        if unused == "retry" and group.retries < self.config.max_retries:
            group.retries += 1
            self._to_wait([group_id], reason)
        elif unused == "mask" and left:
            group.reason = reason
        else:
            self._drop(group_id, group, reason)

    def _drop(self, group_id: int, group: Group, reason: str) -> None:
        group.place, group.reason = "dropped", reason
        self.queue = [i for i in self.queue if i != group_id]

    def _give_up(self, ids: Iterable[int], reason: str = "worker_died") -> None:
        again = []
        for group_id in list(ids):
            group = self.groups[group_id]
            if group.reissues < self.config.max_reissues:
                group.reissues += 1
                again.append(group_id)
            else:
                self._drop(group_id, group, reason)
        self._to_wait(again, reason)

    def _to_wait(self, ids: list[int], reason: str) -> None:
        for group_id in ids:
            group = self.groups[group_id]
            group.place, group.reason = "waiting", reason
            group.attempt += 1
        self.queue = [i for i in self.queue if i not in ids]
        if ids:
            self.waiting.append(set(ids))

    # --- versions

    def knows(self, *versions: int) -> bool:
        """Whether these and all their ancestors were told."""
        return all(self._path(version) for version in versions)

    def _path(self, version: int) -> list[VersionRecord]:
        """The record and its ancestors; nothing if one of them is unknown."""
        path: list[VersionRecord] = []
        above: int | None = version
        while above is not None:
            if above not in self.known:
                return []
            path.append(self.known[above])
            above = path[-1].parent
        return path

    def _distance(self, version: int, position: Position) -> int:
        mine = {r.version: r.step for r in self._path(version)}
        meet = next(r for r in self._path(position.version) if r.version in mine)
        return self.known[version].step + position.step - 2 * meet.step

    def _ages(self, group: RolloutGroup, position: Position) -> dict[int, int]:
        return {version: self._distance(version, position) for version in group.versions}

    # --- what is there

    def check(self, buffer: DrivenBuffer) -> None:
        """Compare every group with the ledger, and every number with the buffer's own."""
        rows = {row.group_id: row for row in buffer.ledger.groups()}
        assert rows.keys() == self.groups.keys(), "issued is not what is accounted for"
        for group_id, group in self.groups.items():
            row = rows[group_id]
            state = STATES.get(group.place, group.place)
            found = (row.state, row.attempt, row.retries)
            assert found == (state, group.attempt, group.retries), f"{row} is not {group}"
            if group.place in {"dropped", "queued"}:
                assert row.reason == group.reason, f"{row} is not {group}"
        assert len({(row.epoch, row.prompt_id) for row in rows.values()}) == len(rows)
        facts = buffer.status()
        places = [group.place for group in self.groups.values()]
        assert facts["queue_groups"] == places.count("queued") == len(self.queue)
        assert facts["in_flight_groups"] == places.count("flight")
        assert places.count("queued") + places.count("flight") <= self.config.capacity
        free = [account.total - account.used for account in self.accounts.values()]
        assert facts["credit_groups"] == sum(max(0, each) for each in free)
