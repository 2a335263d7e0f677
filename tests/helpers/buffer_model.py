"""What the buffer must do, said again and more simply: a model to compare the real one with.

It shares no code with the buffer: groups lie in one dict, distances are walked in the table of
versions, nothing is cached or indexed. Where the contract leaves an order open (several groups
given up at the same moment), any order will do. `heard` takes a message that the buffer was told
and all that the buffer then told others, and raises AssertionError where the two differ.
"""

from __future__ import annotations

from tests.helpers.buffer_model_batches import BatchesModel
from tests.helpers.buffer_model_groups import Account, Group
from tests.helpers.driven_buffer import LIFE, DrivenBuffer, assignments

from ratchet.actors.buffer import CheckLeases
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
from ratchet.types import Assignment, VersionRecord

STATES = {"waiting": "issued", "flight": "claimed", "queued": "finished"}
"""by what the ledger calls it, where that is another word"""


class BufferModel(BatchesModel):
    """The state of a buffer, and what it must say next."""

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
