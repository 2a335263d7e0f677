"""What the buffer relies on: the ledger against a plain model, and the death of its process."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ratchet.storage.groups import STATES
from ratchet.storage.ledger import Cursor, GroupLedger, LedgerError

ROOT = Path(__file__).parents[2]
ALLOWED = {  # the states that a transition may start from, as the architecture has them
    "claim": {"issued"},
    "finish": {"claimed"},
    "retry": {"claimed", "finished", "batched"},
    "mask": {"finished"},
    "drop": {"issued", "claimed", "finished", "batched"},
    "batch": {"finished"},
    "train": {"batched"},
    "requeue": {"issued"},
    "commit": {"trained"},
    "lose": {"trained", "committed"},
}
GROUPS = st.integers(0, 3)
OFF_BY = st.sampled_from([0, 0, 0, 1, -1])
"""How far an attempt or step that is named lies from the right one: mostly not at all."""


class LedgerMachine(RuleBasedStateMachine):
    """Any order of calls: the ledger does what a dictionary does, and refuses the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = GroupLedger.open(None)
        self.model: dict[int, dict[str, Any]] = {}
        self.clock = 0.0

    def tick(self) -> float:
        self.clock += 1.0
        return self.clock

    def attempt(self, group_id: int, off_by: int) -> int:
        return off_by + (self.model[group_id]["attempt"] if group_id in self.model else 0)

    def some(self, data: st.DataObject, state: str) -> list[int]:
        """Groups in a state, and now and then any groups at all."""
        fitting = [key for key, group in self.model.items() if group["state"] == state]
        if not fitting or data.draw(st.integers(0, 4)) == 0:
            return data.draw(st.lists(GROUPS, min_size=1, max_size=3))
        return data.draw(st.lists(st.sampled_from(fitting), min_size=1, unique=True))

    def fits(self, name: str, group_id: int, **expected: Any) -> bool:
        group = self.model.get(group_id)
        if group is None or group["state"] not in ALLOWED[name]:
            return False
        return all(group[key] == value for key, value in expected.items())

    def apply(self, fits: bool, call: Any, *changes: tuple[int, dict[str, Any]]) -> None:
        if not fits:
            with pytest.raises(LedgerError):
                call()
            return
        call()
        for group_id, change in changes:
            self.model[group_id].update(change)
            self.model[group_id]["num_events"] += 1

    @precondition(lambda self: len(self.model) < 4)
    @rule(epoch=st.integers(0, 1))
    def issue(self, epoch: int) -> None:
        group_id = self.ledger.issue(f"p{len(self.model)}", epoch, self.tick())
        assert group_id == len(self.model)
        self.model[group_id] = {
            "state": "issued",
            "attempt": 0,
            "retries": 0,
            "epoch": epoch,
            "reason": None,
            "worker": None,
            "staleness": None,
            "trained_step": None,
            "num_events": 1,
        }

    @rule(group_id=GROUPS, off_by=OFF_BY, worker=st.sampled_from(["a", "b"]))
    def claim(self, group_id: int, off_by: int, worker: str) -> None:
        attempt = self.attempt(group_id, off_by)
        self.apply(
            self.fits("claim", group_id, attempt=attempt),
            lambda: self.ledger.claim(group_id, attempt, worker, self.tick()),
            (group_id, {"state": "claimed", "worker": worker, "reason": None}),
        )

    @rule(group_id=GROUPS, off_by=OFF_BY)
    def finish(self, group_id: int, off_by: int) -> None:
        attempt = self.attempt(group_id, off_by)
        self.apply(
            self.fits("finish", group_id, attempt=attempt),
            lambda: self.ledger.finish(
                group_id,
                attempt,
                min_version=0,
                max_version=1,
                reward_mean=0.5,
                reward_std=0.5,
                num_tokens=8,
                num_rollouts=2,
                now=self.tick(),
            ),
            (group_id, {"state": "finished"}),
        )

    @rule(group_id=GROUPS, reason=st.sampled_from(["stale", "aborted"]))
    def mask(self, group_id: int, reason: str) -> None:
        self.apply(
            self.fits("mask", group_id),
            lambda: self.ledger.mask(group_id, reason, self.tick()),
            (group_id, {"reason": reason}),
        )

    @rule(group_id=GROUPS, off_by=OFF_BY, reason=st.sampled_from(["lease", "stale"]))
    def retry(self, group_id: int, off_by: int, reason: str) -> None:
        attempt = self.attempt(group_id, off_by)
        counts = reason == "stale"
        change = {
            "retries": self.model.get(group_id, {}).get("retries", 0) + counts,
            "state": "issued",
            "attempt": attempt + 1,
            "reason": reason,
            "worker": None,
            "staleness": None,
            "trained_step": None,
        }
        self.apply(
            self.fits("retry", group_id, attempt=attempt),
            lambda: self.ledger.retry(group_id, attempt, reason, self.tick(), counts=counts),
            (group_id, change),
        )

    @rule(group_id=GROUPS, reason=st.sampled_from(["stale", "filtered"]))
    def drop(self, group_id: int, reason: str) -> None:
        self.apply(
            self.fits("drop", group_id),
            lambda: self.ledger.drop(group_id, reason, self.tick()),
            (group_id, {"state": "dropped", "reason": reason, "trained_step": None}),
        )

    @rule(data=st.data(), step=st.integers(1, 2))
    def batch(self, data: st.DataObject, step: int) -> None:
        group_ids = self.some(data, "finished")
        unique = len(set(group_ids)) == len(group_ids)
        staleness = {group_id: group_id % 3 for group_id in group_ids}
        self.apply(
            unique and all(self.fits("batch", group_id) for group_id in group_ids),
            lambda: self.ledger.batch(group_ids, step, staleness, self.tick()),
            *(
                (i, {"state": "batched", "trained_step": step, "staleness": i % 3})
                for i in group_ids
            ),
        )

    @rule(data=st.data(), off_by=OFF_BY)
    def train(self, data: st.DataObject, off_by: int) -> None:
        group_ids = self.some(data, "batched")
        step = off_by + (self.model.get(group_ids[0], {}).get("trained_step") or 1)
        unique = len(set(group_ids)) == len(group_ids)
        fits = all(self.fits("train", group_id, trained_step=step) for group_id in group_ids)
        self.apply(
            unique and fits,
            lambda: self.ledger.train(group_ids, step, 3, self.tick()),
            *((group_id, {"state": "trained"}) for group_id in group_ids),
        )

    @rule(group_id=GROUPS, off_by=OFF_BY)
    def requeue(self, group_id: int, off_by: int) -> None:
        attempt = self.attempt(group_id, off_by)
        result = {"min_version": 0, "max_version": 1, "reward_mean": 0.5, "reward_std": 0.5}
        self.apply(
            self.fits("requeue", group_id, attempt=attempt),
            lambda: self.ledger.finish(
                group_id,
                attempt,
                **result,
                num_tokens=8,
                num_rollouts=2,
                now=self.tick(),
                requeued=True,
            ),
            (group_id, {"state": "finished", "reason": None}),
        )

    @rule(step=st.integers(0, 2))
    def commit(self, step: int) -> None:
        ids = [
            group_id
            for group_id, group in self.model.items()
            if self.fits("commit", group_id) and group["trained_step"] <= step
        ]
        assert sorted(self.ledger.commit(step, self.tick())) == ids
        self.apply(True, lambda: None, *((group_id, {"state": "committed"}) for group_id in ids))

    @rule(step=st.integers(1, 2))
    def lose(self, step: int) -> None:
        ids = [i for i in self.model if self.fits("lose", i, trained_step=step)]
        lost = self.ledger.lose(3, step, "step_lost", self.tick())
        assert [row.group_id for row in lost] == ids
        for group_id in ids:
            change = {
                "state": "issued",
                "attempt": self.model[group_id]["attempt"] + 1,
                "reason": "step_lost",
                "worker": None,
                "staleness": None,
                "trained_step": None,
            }
            self.apply(True, lambda: None, (group_id, change))

    @rule()
    def work(self) -> None:
        """What mostly happens: every group that waits is claimed and finished."""
        for group_id, group in self.model.items():
            if group["state"] == "issued":
                self.claim(group_id, 0, "a")
            if group["state"] == "claimed":
                self.finish(group_id, 0)

    @rule()
    def flush(self) -> None:
        self.ledger.flush()

    @invariant()
    def agrees_with_the_model(self) -> None:
        rows = {row.group_id: row for row in self.ledger.groups()}
        assert rows.keys() == self.model.keys()
        for group_id, expected in self.model.items():
            found = {
                name: getattr(rows[group_id], name) for name in expected.keys() - {"num_events"}
            }
            assert found == {key: expected[key] for key in found}
            assert len(self.ledger.events(group_id)) == expected["num_events"]

    @invariant()
    def conserves_groups(self) -> None:
        counts = self.ledger.counts()
        states = [group["state"] for group in self.model.values()]
        assert counts == {state: states.count(state) for state in STATES}
        dropped = [g["reason"] for g in self.model.values() if g["state"] == "dropped"]
        assert self.ledger.reasons() == {reason: dropped.count(reason) for reason in set(dropped)}


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase

CHILD = """
import sys
from pathlib import Path
from ratchet.storage.ledger import GroupLedger

ledger = GroupLedger.open(Path(sys.argv[1]))
position = ledger.load_cursor().position
for flushed in (True, False):
    for group_id in [ledger.issue(f"p{position + i}", 0, 1.0) for i in range(5)]:
        ledger.claim(group_id, 0, "rollout-0", 2.0)
    position += 5
    ledger.save_cursor(0, position)
    if flushed:
        ledger.flush()
print("ready", flush=True)
sys.stdin.read()  # killed here, with a flush half made
"""


def test_the_last_flush_survives_a_kill_and_nothing_of_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    for kills in range(1, 4):
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            os.kill(child.pid, signal.SIGKILL)
        ledger = GroupLedger.open(path)
        assert ledger.load_cursor() == Cursor(0, 5 * kills)
        assert ledger.counts()["claimed"] == 5 * kills == sum(ledger.counts().values())
        assert [row.prompt_id for row in ledger.groups()] == [f"p{i}" for i in range(5 * kills)]
        assert ledger.issue("next", 0, 1.0) == 5 * kills
        ledger._database.connection.execute("ROLLBACK")
        ledger.close()
