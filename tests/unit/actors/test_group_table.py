"""A group is in exactly one place: proved against a dictionary and the ledger's own counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.helpers.training import make_groups

from ratchet.actors.group_table import Entry, GroupTable
from ratchet.actors.prompt_source import PromptSource
from ratchet.storage.ledger import GroupLedger
from ratchet.types import Prompt, RolloutGroup

WORKERS = [("r0", "a"), ("r0", "b"), ("r1", "a")]
GROUP = make_groups(1, 2)[0]


def group_of(entry: Entry) -> RolloutGroup:
    return RolloutGroup(
        entry.group_id, entry.attempt, entry.prompt.prompt_id, entry.epoch, GROUP.rollouts
    )


def make_table(max_retries: int = 1, max_reissues: int = 1) -> tuple[GroupTable, GroupLedger]:
    ledger = GroupLedger.open(None)
    source = PromptSource([Prompt(f"p{i}", f"{i}>") for i in range(3)], seed=0)
    table = GroupTable(
        ledger, source, wall_time=lambda: 1.0, max_retries=max_retries, max_reissues=max_reissues
    )
    return table, ledger


class Places(RuleBasedStateMachine):
    """Each rule is one thing that the buffer does; `place` says where each group must be."""

    @initialize(retries=st.integers(0, 2), reissues=st.integers(0, 2))
    def begin(self, retries: int, reissues: int) -> None:
        self.table, self.ledger = make_table(retries, reissues)
        self.max = {"retries": retries, "reissues": reissues}
        self.now = 0.0
        self.step = 0
        self.entries: dict[int, Entry] = {}
        self.place: dict[int, str] = {}
        self.again: dict[int, Counter[str]] = {}
        self.waiting: list[int] = []
        self.reasons: Counter[str] = Counter()
        self.dropped_in_window: Counter[str] = Counter()

    def at(self, place: str) -> list[int]:
        return [group for group, where in self.place.items() if where == place]

    def pick(self, data: st.DataObject, place: str) -> Entry:
        return self.entries[data.draw(st.sampled_from(self.at(place)))]

    def count_back(self, entry: Entry, kind: str, reason: str) -> None:
        """Back to issued within the budget, else dropped."""
        group = entry.group_id
        if self.again[group][kind] < self.max[kind]:
            self.again[group][kind] += 1
            self.place[group] = "issued"
            self.waiting.append(group)
        else:
            self.count_drop(group, reason)

    def count_drop(self, group: int, reason: str) -> None:
        self.place[group] = "dropped"
        self.reasons[reason] += 1
        self.dropped_in_window[reason] += 1

    @rule(worker=st.sampled_from(WORKERS))
    def claim(self, worker: tuple[str, str]) -> None:
        self.now += 1
        entry = self.table.claim(worker, until=self.now)
        if self.waiting:
            assert entry.group_id == self.waiting.pop(0)  # those that wait come first
        else:
            assert entry.group_id not in self.place
            self.again[entry.group_id] = Counter()
        self.entries[entry.group_id] = entry
        self.place[entry.group_id] = "claimed"
        assert entry.attempt == self.again[entry.group_id].total()

    @precondition(lambda self: self.at("claimed"))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        entry = self.pick(data, "claimed")
        self.table.finish(entry, group_of(entry), (0, 3))
        self.place[entry.group_id] = "finished"

    @precondition(lambda self: self.at("finished"))
    @rule(data=st.data())
    def batch(self, data: st.DataObject) -> None:
        queued = self.table.queued()
        number = data.draw(st.integers(1, len(queued)))
        if self.at("batched"):
            return
        self.step += 1
        groups = self.table.batch(queued[:number], self.step)
        assert [g.group_id for g in groups] == [e.group_id for e in queued[:number]]
        for group in groups:
            self.place[group.group_id] = "batched"

    @precondition(lambda self: self.at("batched"))
    @rule(data=st.data())
    def train_and_reject(self, data: st.DataObject) -> None:
        batched = self.at("batched")
        trained = data.draw(st.lists(st.sampled_from(batched), unique=True))
        self.table.train(trained, self.step, version=self.step)
        for group in batched:
            if group in trained:
                self.place[group] = "trained"
            else:
                self.table.reject(group, "stale")
                self.count_back(self.entries[group], "retries", "stale")

    @precondition(lambda self: self.at("claimed") + self.at("finished"))
    @rule(data=st.data(), reason=st.sampled_from(["reward", "stale"]))
    def unused(self, data: st.DataObject, reason: str) -> None:
        place = data.draw(st.sampled_from([p for p in ("claimed", "finished") if self.at(p)]))
        entry = self.pick(data, place)
        self.table.unused(entry, reason)
        self.count_back(entry, "retries", reason)

    @precondition(lambda self: self.at("claimed"))
    @rule(worker=st.sampled_from(WORKERS))
    def worker_dies(self, worker: tuple[str, str]) -> None:
        for entry in self.table.held_by(*worker):
            assert self.place[entry.group_id] == "claimed"
            self.table.reissue(entry, "worker_died")
            self.count_back(entry, "reissues", "worker_died")
        assert self.table.held_by(*worker) == []

    @rule(share=st.floats(0, 1))
    def leases_end(self, share: float) -> None:
        now = self.now * share
        for entry in self.table.overdue(now):
            assert entry.lease_end <= now
            self.table.reissue(entry, "lease_expired")
            self.count_back(entry, "reissues", "lease_expired")
        end = self.table.next_lease_end()
        assert end is None or end > now

    @precondition(lambda self: self.at("batched"))
    @rule()
    def trainer_dies(self) -> None:
        for entry in self.table.batched():
            self.table.reissue(entry, "trainer_died")
            self.count_back(entry, "reissues", "trainer_died")

    @precondition(lambda self: self.at("finished"))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        entry = self.pick(data, "finished")
        self.table.drop(entry, "zero_spread")
        self.count_drop(entry.group_id, "zero_spread")

    @rule()
    def read_window(self) -> None:
        assert self.table.take_window().dropped == self.dropped_in_window
        assert self.table.take_window().dropped == {}
        self.dropped_in_window.clear()

    @rule()
    def flush(self) -> None:
        self.table.flush()
        assert not self.table.dirty

    @invariant()
    def every_group_is_where_it_must_be(self) -> None:
        if not hasattr(self, "table"):
            return
        counts = Counter(self.place.values())
        assert {k: n for k, n in self.ledger.counts().items() if n} == dict(counts)
        assert self.ledger.reasons() == dict(self.reasons)
        assert sorted(self.place) == list(range(len(self.place)))  # issued: each number once
        assert self.table.num_in_flight == counts["claimed"]
        assert self.table.num_queued == counts["finished"] == len(self.table.queued())
        assert self.table.num_open == counts["claimed"] + counts["finished"]
        assert {e.group_id for e in self.table.batched()} == set(self.at("batched"))
        held = [e.group_id for worker in WORKERS for e in self.table.held_by(*worker)]
        assert sorted(held) == sorted(self.at("claimed"))
        for entry in map(self.entries.get, self.at("claimed")):
            assert entry is not None
            key = (entry.worker, entry.incarnation, entry.group_id)
            assert self.table.claimed(*key, entry.attempt) is entry
            assert self.table.claimed(*key, entry.attempt + 1) is None
            assert self.table.claimed(entry.worker, "other", *key[2:], entry.attempt) is None
        for row in self.ledger.groups():
            assert row.attempt == self.again[row.group_id].total()

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.table.close()


class TestPlaces(Places.TestCase):
    settings = settings(
        max_examples=25,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )


# --- examples


def finish(table: GroupTable, entry: Entry) -> None:
    table.finish(entry, group_of(entry), (0,))


@pytest.mark.parametrize("max_retries", [0, 2])
def test_a_group_is_retried_as_often_as_allowed_and_then_dropped(max_retries: int) -> None:
    table, ledger = make_table(max_retries=max_retries)
    for attempt in range(max_retries + 1):
        entry = table.claim(("r0", "a"), until=1.0)
        assert (entry.group_id, entry.attempt, entry.prompt.prompt_id) == (
            0, attempt, entry.prompt.prompt_id,
        )  # fmt: skip
        table.unused(entry, "reward")
    assert ledger.reasons() == {"reward": 1}
    window = table.take_window()
    assert (window.retried, dict(window.dropped)) == (max_retries, {"reward": 1})
    assert table.claim(("r0", "a"), until=1.0).group_id == 1


def test_a_lease_has_ended_at_its_end_and_not_before() -> None:
    table, _ = make_table()
    first, second = (table.claim(("r0", "a"), until=end) for end in (3.0, 4.0))
    assert table.next_lease_end() == 3.0
    assert table.overdue(2.9) == []
    assert table.overdue(3.0) == [first]
    assert table.overdue(9.0) == [first, second]


def test_retries_and_reissues_have_budgets_of_their_own() -> None:
    table, ledger = make_table(max_retries=1, max_reissues=1)
    table.reissue(table.claim(("r0", "a"), until=1.0), "worker_died")
    table.unused(table.claim(("r0", "a"), until=1.0), "reward")
    entry = table.claim(("r0", "a"), until=1.0)
    assert (entry.group_id, entry.attempt) == (0, 2)
    table.reissue(entry, "lease_expired")
    assert ledger.reasons() == {"lease_expired": 1}
    assert table.take_window().reissued == {"worker_died": 1, "lease_expired": 1}


def test_a_retry_begins_from_the_pristine_prompt() -> None:
    table, _ = make_table()
    entry = table.claim(("r0", "a"), until=1.0)
    prompt = entry.prompt
    finish(table, entry)
    table.unused(entry, "stale")
    again = table.claim(("r1", "a"), until=2.0)
    assert (again.prompt, again.group, again.versions) == (prompt, None, ())
    assert (again.worker, again.lease_end) == ("r1", 2.0)


def gone(table: GroupTable, entry: Entry) -> None:
    table.drop(entry, "x")


def waits(table: GroupTable, entry: Entry) -> None:
    table.reissue(entry, "x")


@pytest.mark.parametrize("send_away", [gone, waits])
def test_a_group_that_is_nowhere_cannot_be_moved(send_away: Any) -> None:
    table, ledger = make_table()
    entry = table.claim(("r0", "a"), until=1.0)
    send_away(table, entry)
    before = ledger.counts()
    for move in (lambda: table.drop(entry, "y"), lambda: table.reissue(entry, "y")):
        with pytest.raises(RuntimeError, match="group 0 is in no place"):
            move()
    with pytest.raises(KeyError):
        table.reject(0, "stale")
    with pytest.raises(KeyError):
        finish(table, entry)
    assert ledger.counts() == before


def test_the_ledger_says_what_was_trained_and_by_whom() -> None:
    table, ledger = make_table()
    entries = [table.claim(("r0", "a"), until=1.0) for _ in range(2)]
    for entry in reversed(entries):
        finish(table, entry)
    entries[1].staleness = 3
    groups = table.batch(table.queued(), step=5)
    assert [group.group_id for group in groups] == [1, 0]
    table.train([1], 5, version=4)
    table.reject(0, "non_finite")
    row = ledger.group(1)
    assert row is not None
    assert (row.state, row.trained_step, row.trained_version, row.staleness) == ("trained", 5, 4, 3)
    assert table.batched() == []
    assert table.claim(("r0", "a"), until=2.0).group_id == 0


def test_a_flush_saves_the_cursor_behind_the_prompts_that_were_issued() -> None:
    table, ledger = make_table()
    assert not table.dirty
    for _ in range(4):
        table.claim(("r0", "a"), until=1.0)
    assert table.dirty
    table.flush()
    assert not table.dirty
    assert tuple(ledger.load_cursor()) == (1, 1)  # three prompts an epoch
    epochs = [(row.epoch, row.prompt_id) for row in ledger.groups()]
    assert [epoch for epoch, _ in epochs] == [0, 0, 0, 1]
    assert {prompt for _, prompt in epochs[:3]} == {"p0", "p1", "p2"}
