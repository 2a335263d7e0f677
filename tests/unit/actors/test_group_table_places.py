"""A group is in exactly one place: proved against a dictionary and the ledger's own counts."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.helpers.group_tables import WORKERS, group_of, make_table

from ratchet.actors.entry import Entry
from ratchet.actors.window import Window
from ratchet.types import RolloutGroup

POPULATIONS = ("offered", "trained", "lost")


class Places(RuleBasedStateMachine):
    """Each rule is one thing that the buffer does; `place` says where each group must be."""

    @initialize(reissues=st.integers(0, 2))
    def begin(self, reissues: int) -> None:
        self.table, self.ledger = make_table(reissues)
        self.max_reissues = reissues
        self.now = 0.0
        self.step = 0
        self.entries: dict[int, Entry] = {}
        self.place: dict[int, str] = {}
        self.again: dict[int, Counter[str]] = {}
        self.waiting: list[int] = []
        self.masked: dict[int, str] = {}
        self.reasons: Counter[str] = Counter()
        names = ("dropped", "retried", "masked", "reissued")
        self.window = {name: Counter[str]() for name in names}
        self.made: dict[int, RolloutGroup] = {}
        self.populations: dict[str, list[RolloutGroup]] = {name: [] for name in POPULATIONS}
        self.read: Counter[str] = Counter()

    def at(self, place: str) -> list[int]:
        return [group for group, where in self.place.items() if where == place]

    def pick(self, data: st.DataObject, place: str) -> Entry:
        return self.entries[data.draw(st.sampled_from(self.at(place)))]

    def count_back(self, group: int, kind: str) -> None:
        self.again[group][kind] += 1
        self.leave(group, "issued")
        self.waiting.append(group)
        self.masked.pop(group, None)

    def count_reissue(self, group: int, reason: str) -> None:
        """Back to issued within the budget, else dropped."""
        if self.again[group]["reissues"] < self.max_reissues:
            self.count_back(group, "reissues")
            self.window["reissued"][reason] += 1
        else:
            self.count_drop(group, reason)

    def leave(self, group: int, to: str) -> None:
        """Whatever was finished is lost, and only that."""
        if self.place[group] in {"finished", "batched"}:
            self.populations["lost"].append(self.made[group])
        self.place[group] = to

    def count_drop(self, group: int, reason: str) -> None:
        self.leave(group, "dropped")
        self.reasons[reason] += 1
        self.window["dropped"][reason] += 1

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
        self.made[entry.group_id] = group = group_of(entry)
        self.table.finish(entry, group, (0, 3))
        self.place[entry.group_id] = "finished"
        self.populations["offered"].append(group)

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
            if group.group_id in self.masked:
                self.window["masked"][self.masked[group.group_id]] += 1

    @precondition(lambda self: self.at("batched"))
    @rule(data=st.data())
    def train_and_reject(self, data: st.DataObject) -> None:
        batched = self.at("batched")
        trained = data.draw(st.lists(st.sampled_from(batched), unique=True))
        self.table.train(trained, self.step, version=self.step)
        for group in batched:
            if group in trained:
                self.place[group] = "trained"
                self.populations["trained"].append(self.made[group])
            else:
                assert self.table.rejected(group) is self.entries[group]
                self.retry_one(self.entries[group], "stale")

    @precondition(lambda self: self.at("claimed") + self.at("finished"))
    @rule(data=st.data(), reason=st.sampled_from(["reward", "stale"]))
    def retry(self, data: st.DataObject, reason: str) -> None:
        place = data.draw(st.sampled_from([p for p in ("claimed", "finished") if self.at(p)]))
        self.retry_one(self.pick(data, place), reason)

    def retry_one(self, entry: Entry, reason: str) -> None:
        self.table.retry(entry, reason)
        self.window["retried"][reason] += 1
        self.count_back(entry.group_id, "retries")

    @precondition(lambda self: self.at("finished"))
    @rule(data=st.data(), reason=st.sampled_from(["aborted", "stale"]))
    def mask(self, data: st.DataObject, reason: str) -> None:
        entry = self.pick(data, "finished")
        self.table.mask(entry, reason)
        self.masked[entry.group_id] = reason

    @precondition(lambda self: self.at("claimed"))
    @rule(worker=st.sampled_from(WORKERS))
    def worker_dies(self, worker: tuple[str, str]) -> None:
        for entry in self.table.in_flight.held_by(*worker):
            assert self.place[entry.group_id] == "claimed"
            self.table.reissue(entry, "worker_died")
            self.count_reissue(entry.group_id, "worker_died")
        assert self.table.in_flight.held_by(*worker) == []

    @rule(share=st.floats(0, 1))
    def leases_end(self, share: float) -> None:
        now = self.now * share
        for entry in self.table.in_flight.overdue(now):
            assert entry.lease_end <= now
            self.table.reissue(entry, "lease_expired")
            self.count_reissue(entry.group_id, "lease_expired")
        end = self.table.in_flight.next_end()
        assert end is None or end > now

    @precondition(lambda self: self.at("batched"))
    @rule()
    def trainer_dies(self) -> None:
        for entry in self.table.batched():
            self.table.reissue(entry, "trainer_died")
            self.count_reissue(entry.group_id, "trainer_died")

    @precondition(lambda self: self.at("finished"))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        entry = self.pick(data, "finished")
        self.table.drop(entry, "filter:zero_spread")
        self.count_drop(entry.group_id, "filter:zero_spread")

    @rule()
    def read_window(self) -> None:
        window = self.table.take_window()
        for name, expected in self.window.items():
            assert getattr(window, name) == expected
            expected.clear()
        for name, groups in self.populations.items():
            found = getattr(window, name).read()
            self.read[name] += found.groups
            assert found.groups == len(groups)
            tokens = Counter(float(len(r.completion_ids)) for g in groups for r in g.rollouts)
            assert found.tokens.histogram == tokens
            assert found.rewards.histogram == Counter(r for g in groups for r in g.rewards)
            groups.clear()
        assert self.table.take_window() == Window()

    @rule()
    def flush(self) -> None:
        self.table.flush()
        assert not self.table.dirty

    @invariant()
    def what_was_offered_is_trained_lost_or_still_there(self) -> None:
        if not hasattr(self, "table"):
            return
        window = self.table.window
        now = {name: self.read[name] + getattr(window, name).num_groups for name in POPULATIONS}
        there = self.table.num_queued + len(self.table.batched())
        assert now["offered"] == now["trained"] + now["lost"] + there

    @invariant()
    def every_group_is_where_it_must_be(self) -> None:
        if not hasattr(self, "table"):
            return
        counts = Counter(self.place.values())
        assert {k: n for k, n in self.ledger.counts().items() if n} == dict(counts)
        assert self.ledger.reasons() == dict(self.reasons)
        assert sorted(self.place) == list(range(len(self.place)))  # issued: each number once
        assert len(self.table.in_flight) == counts["claimed"]
        assert self.table.num_queued == counts["finished"] == len(self.table.queued())
        assert self.table.num_open == counts["claimed"] + counts["finished"]
        assert {e.group_id for e in self.table.batched()} == set(self.at("batched"))
        held = [e.group_id for worker in WORKERS for e in self.table.in_flight.held_by(*worker)]
        assert sorted(held) == sorted(self.at("claimed"))
        for entry in map(self.entries.get, self.at("claimed")):
            assert entry is not None
            key = (entry.worker, entry.incarnation, entry.group_id)
            assert self.table.in_flight.find(*key, entry.attempt) is entry
            assert self.table.in_flight.find(*key, entry.attempt + 1) is None
            assert self.table.in_flight.find(entry.worker, "other", *key[2:], entry.attempt) is None
        for row in self.ledger.groups():
            assert row.attempt == self.again[row.group_id].total()
            assert row.retries == self.again[row.group_id]["retries"]
            if row.state == "finished":
                assert row.reason == self.masked.get(row.group_id)

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
