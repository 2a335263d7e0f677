"""Kill the buffer, the trainer or both anywhere: each prompt counts once an epoch."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.actors import RecordingLog
from tests.helpers.training import make_groups

from ratchet.actors.entry import Entry
from ratchet.actors.group_table import GroupTable
from ratchet.actors.judging import Judging
from ratchet.actors.prompt_source import PromptSource
from ratchet.actors.recovery import Recovery
from ratchet.actors.stored_groups import StoredGroups
from ratchet.config import BufferConfig
from ratchet.errors import TaskError
from ratchet.messages import RequestBatch, StepTrained
from ratchet.staleness import Lineage
from ratchet.storage.ledger import GroupLedger
from ratchet.storage.payloads import Payloads
from ratchet.types import Prompt, RolloutGroup

GROUP = make_groups(1, 2)[0]
PROMPTS = [Prompt(f"p{i}", f"{i}>") for i in range(5)]


class Scene:
    """A buffer's table on a file, and a lineage in which the version is the step."""

    def __init__(
        self, path: Path, num_versions: int = 9, *, keep: bool = False, **buffer: Any
    ) -> None:
        self.path = path
        path.parent.mkdir(exist_ok=True)
        self.keep = keep
        self.buffer = BufferConfig(**{"batch_groups": 1} | buffer)
        self.lineage = Lineage()
        self.newest = num_versions - 1
        for version in range(num_versions):
            self.lineage.add(version, version, version - 1 if version else None)
        self.open()

    def open(self, prompts: list[Prompt] = PROMPTS) -> None:
        self.ledger = GroupLedger.open(self.path)
        source = PromptSource(prompts, seed=0)
        payloads = Payloads(self.path.parent / "payloads") if self.keep else None
        self.stored = StoredGroups(payloads, max_staleness=1)
        self.table = GroupTable(
            self.ledger,
            source,
            wall_time=lambda: 1.0,
            now=lambda: 1.0,
            max_reissues=3,
            stored=self.stored,
        )
        self.log = RecordingLog()
        self.judging = Judging(self.buffer, self.table, self.lineage, self.log)
        self.recovery = Recovery(self.table, self.lineage, self.judging.reject, self.log)

    def kill(self) -> None:
        """What was flushed is there; then another life begins."""
        self.table.flush()
        self.ledger.close()
        self.stored.close()
        self.open()

    def claim(self, number: int = 1) -> list[Entry]:
        return [self.table.claim(("w", "i"), until=9.0) for _ in range(number)]

    def finish(self, *entries: Entry) -> None:
        for entry in entries:
            group = RolloutGroup(
                entry.group_id, entry.attempt, entry.prompt.prompt_id, entry.epoch, GROUP.rollouts
            )
            self.table.finish(entry, group, (0,))
            self.stored.keep(entry, group)

    def batch(self, step: int, number: int = 1) -> list[int]:
        entries = self.claim(number)
        self.finish(*entries)
        self.table.batch(self.table.queued(), step)
        return [entry.group_id for entry in entries]

    def next_batch(self, step: int) -> list[int]:
        """One group, a stored one before all others."""
        if not self.table.stored:
            return self.batch(step)
        stored = self.table.waiting.next_stored()
        if stored is None:
            return self.batch(step)
        self.table.requeue(*stored, stored[1].versions)
        self.stored.keep(*stored)
        self.table.batch(self.table.queued(), step)
        return [stored[0].group_id]

    def train(self, step: int, number: int = 1) -> list[int]:
        ids = self.batch(step, number)
        self.table.train(ids, step, version=step - 1)
        return ids

    def request(self, term: int, version: int, done: StepTrained | None = None) -> RequestBatch:
        step = self.lineage.step(version)
        return RequestBatch("trainer-0", term, version, step, done)

    def requeued(self) -> list[tuple[int, int]]:
        """Queue all that is stored; return (group, attempt) of each."""
        found = []
        while (stored := self.table.waiting.next_stored()) is not None:
            entry, group = stored
            assert (entry.group_id, entry.attempt) == (group.group_id, group.attempt)
            assert group.rollouts == GROUP.rollouts
            self.table.requeue(entry, group, group.versions)
            self.stored.keep(entry, group)
            found.append((group.group_id, group.attempt))
        return found

    def state(self, *group_ids: int) -> list[tuple[str, int, str | None]]:
        rows = [self.ledger.group(group_id) for group_id in group_ids]
        return [(row.state, row.attempt, row.reason) for row in rows if row is not None]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "ledger.sqlite")


def test_a_new_term_takes_back_the_steps_past_its_checkpoint(scene: Scene) -> None:
    first, second, third = (scene.train(step)[0] for step in (1, 2, 3))
    scene.recovery.settle(scene.request(2, 1))
    assert scene.state(first, second, third) == [
        ("trained", 0, None),
        ("issued", 1, "step_lost"),
        ("issued", 1, "step_lost"),
    ]
    again = [entry.group_id for entry in scene.claim(3)]
    assert again[:2] == [second, third]  # before any new prompt
    lost = [fields["step"] for fields in scene.log.named("step_lost")]
    assert sorted(lost) == [2, 3]


def test_each_term_is_settled_once(scene: Scene) -> None:
    scene.train(1)
    scene.recovery.settle(scene.request(2, 0))
    trained = scene.train(1)  # by the new term, from the same version
    scene.recovery.settle(scene.request(2, 1))
    scene.recovery.settle(scene.request(1, 0))  # a zombie
    assert scene.state(*trained)[0][0] == "trained"


def test_what_another_branch_trained_is_taken_back(scene: Scene) -> None:
    scene.lineage.add(20, 1, 0)  # from the base again
    scene.lineage.add(21, 2, 20)
    first = scene.train(1)
    second = scene.train(2)  # from version 1, which is no ancestor of 21
    scene.recovery.settle(scene.request(2, 21))
    assert scene.state(*first) == [("trained", 0, None)]
    assert scene.state(*second) == [("issued", 1, "step_lost")]


def test_a_new_life_issues_again_what_was_on_its_way(scene: Scene) -> None:
    entries = scene.claim(3)
    scene.finish(entries[1])
    scene.table.drop(entries[2], "stale")
    scene.kill()
    assert scene.state(*(entry.group_id for entry in entries)) == [
        ("issued", 1, "buffer_died"),
        ("issued", 1, "buffer_died"),
        ("dropped", 0, "stale"),
    ]
    assert [entry.group_id for entry in scene.claim(2)] == [0, 1]
    assert scene.claim()[0].prompt.prompt_id not in {e.prompt.prompt_id for e in entries}


def test_a_new_life_remembers_the_retry_budget(scene: Scene) -> None:
    entry = scene.claim()[0]
    scene.table.retry(entry, "stale")
    scene.kill()
    assert scene.claim()[0].retries == 1


def test_the_account_in_the_request_settles_a_batch_of_an_earlier_life(scene: Scene) -> None:
    taken, rejected = scene.batch(1, 2)
    scene.kill()
    assert scene.state(taken, rejected) == [("batched", 0, None)] * 2
    done = StepTrained(1, 1, (taken,), {rejected: "stale"})
    scene.recovery.settle(scene.request(2, 1, done))
    assert scene.state(taken, rejected) == [("trained", 0, None), ("dropped", 0, "stale")]
    row = scene.ledger.group(taken)
    assert row is not None
    assert (row.trained_step, row.trained_version) == (1, 0)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("answer", ["drop", "retry", "mask"])
def test_what_a_step_of_an_earlier_life_rejected_meets_the_handler(
    tmp_path: Path, answer: str, keep: bool
) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        f"def handle(unused):\n"
        f"    assert (unused.reason, unused.group is not None) == ('non_finite', {keep})\n"
        f"    return {answer!r}\n",
        encoding="utf-8",
    )
    scene = Scene(tmp_path / "l.sqlite", keep=keep, unused=f"{own}:handle", max_retries=1)
    (rejected,) = scene.batch(1)
    scene.kill()
    scene.recovery.settle(scene.request(2, 1, StepTrained(1, 1, (), {rejected: "non_finite"})))
    again = answer == "retry"
    assert scene.state(rejected) == [("issued" if again else "dropped", int(again), "non_finite")]
    assert scene.stored.ids == frozenset()  # its result must not come back
    if again:
        scene.kill()
        assert scene.claim()[0].retries == 1  # of the handler's budget


@pytest.mark.parametrize("done", [None, StepTrained(1, 1, (7,), {})])
def test_a_batch_without_an_account_was_not_trained(scene: Scene, done: StepTrained | None) -> None:
    ids = scene.batch(2, 2)
    scene.kill()
    scene.recovery.settle(scene.request(2, 1, done))
    assert scene.state(*ids) == [("issued", 1, "trainer_died")] * 2


def test_a_prompt_that_the_task_lost_is_named(scene: Scene) -> None:
    scene.claim()
    scene.table.flush()
    scene.ledger.close()
    with pytest.raises(TaskError, match="the data has changed"):
        scene.open([Prompt("other", "?")])
    scene.ledger.close()


@pytest.fixture
def keeping(tmp_path: Path) -> Iterator[Scene]:
    """One that keeps payloads."""
    scene = Scene(tmp_path / "ledger.sqlite", keep=True)
    yield scene
    scene.stored.close()
    scene.ledger.close()


def test_finished_groups_come_back_with_the_next_life(keeping: Scene) -> None:
    entries = keeping.claim(4)
    keeping.finish(*entries[:3])
    keeping.table.drop(entries[1], "stale")
    keeping.table.retry(entries[2], "aborted")
    keeping.kill()
    assert keeping.table.num_queued == 0
    assert keeping.requeued() == [(0, 1)]  # neither what was dropped, nor what was judged
    assert keeping.state(0, 1, 2, 3) == [
        ("finished", 1, None),
        ("dropped", 0, "stale"),
        ("issued", 1, "aborted"),
        ("issued", 1, "buffer_died"),
    ]
    assert [entry.group_id for entry in keeping.claim(2)] == [2, 3]
    keeping.kill()
    assert keeping.requeued() == [(0, 2)]  # again and again


def test_what_waits_to_come_back_survives_a_kill(keeping: Scene) -> None:
    keeping.finish(*keeping.claim(2))
    keeping.kill()
    keeping.kill()
    assert keeping.requeued() == [(0, 1), (1, 1)]


def test_stored_groups_have_the_next_place(keeping: Scene) -> None:
    keeping.finish(*keeping.claim(2))
    keeping.kill()
    assert keeping.table.open_groups.num == 0
    assert keeping.table.promised.num == 2
    keeping.requeued()
    assert keeping.table.promised == keeping.table.open_groups
    assert keeping.table.open_groups.num == 2


def test_a_lost_step_comes_back_from_its_payloads(keeping: Scene) -> None:
    ids = [keeping.train(step)[0] for step in (1, 2, 3, 4)]
    keeping.table.commit(1)
    keeping.recovery.settle(keeping.request(2, 1))
    assert keeping.requeued() == [(group_id, 1) for group_id in ids[1:]]
    assert keeping.state(*ids) == [("committed", 0, None)] + [("finished", 1, None)] * 3


def test_a_batch_that_no_trainer_took_comes_back(keeping: Scene) -> None:
    ids = keeping.batch(2, 2)
    keeping.kill()
    keeping.recovery.settle(keeping.request(2, 1))
    assert keeping.requeued() == [(group_id, 1) for group_id in ids]


def test_a_payload_is_gone_with_the_checkpoint_that_has_its_step(keeping: Scene) -> None:
    first, second = keeping.train(1)[0], keeping.train(2)[0]
    assert keeping.stored.ids == {first, second}
    keeping.table.commit(1)
    assert keeping.stored.ids == {second}
    keeping.kill()
    assert keeping.stored.ids == {second}
    assert keeping.stored.saved_step == 1
    keeping.recovery.settle(keeping.request(2, 0))  # from the base, and not from the checkpoint
    assert keeping.requeued() == [(second, 1)]
    assert keeping.state(first) == [("issued", 1, "step_lost")]
    assert keeping.stored.saved_step == 0


def test_payloads_are_kept_as_far_as_a_checkpoint_reaches(keeping: Scene) -> None:
    """2 x max_staleness + 1 steps past the newest one, and as many for the next one."""
    ids = [keeping.train(step)[0] for step in range(1, 10)]
    assert keeping.stored.ids == set(ids[:3] + ids[6:])
    keeping.table.commit(6)
    assert keeping.stored.ids == set(ids[6:])
    ids += [keeping.train(step)[0] for step in range(10, 15)]
    assert keeping.stored.ids == set(ids[6:9] + ids[11:])


def test_a_payload_that_is_damaged_is_generated_again(keeping: Scene) -> None:
    keeping.finish(*keeping.claim(2))
    keeping.table.flush()
    keeping.stored.close()
    (keeping.path.parent / "payloads" / "0.payload").write_bytes(b"torn")
    keeping.kill()
    assert keeping.requeued() == [(1, 1)]
    assert keeping.state(0) == [("issued", 1, "buffer_died")]
    assert keeping.claim()[0].group_id == 0


def test_payloads_without_a_group_that_needs_them_are_removed(keeping: Scene) -> None:
    (entry,) = keeping.claim()
    keeping.finish(entry)
    keeping.table.drop(entry, "stale")
    keeping.table.flush()
    keeping.stored.close()
    path = keeping.path.parent / "payloads"
    for group_id in (0, 77):  # as if the process had died before they were removed
        (path / f"{group_id}.payload").write_bytes(b"old")
    keeping.kill()
    keeping.stored.close()
    assert list(path.iterdir()) == []


def test_a_poisoned_batch_does_not_come_back_for_ever(keeping: Scene) -> None:
    ids = keeping.batch(1)
    for _ in range(3):
        keeping.table.reissue(keeping.table.batched()[0], "trainer_died")
        keeping.requeued()
        keeping.table.batch(keeping.table.queued(), 1)
    keeping.table.reissue(keeping.table.batched()[0], "trainer_died")
    assert keeping.state(*ids) == [("dropped", 3, "trainer_died")]
    assert keeping.stored.ids == set()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_each_prompt_is_trained_once_an_epoch_whatever_is_killed(
    tmp_path: Path, seed: int, keep: bool
) -> None:
    """The weights that are left at the end have met every prompt of an epoch exactly once."""
    rng = random.Random(seed)
    scene = Scene(tmp_path / "ledger.sqlite", num_versions=1, keep=keep)
    term, version, step, done = 1, 0, 0, None
    saved: tuple[int, int, StepTrained | None] = (0, 0, None)
    newest = 0
    while step < 15:  # three epochs of five prompts
        scene.recovery.settle(RequestBatch("t", term, version, step, done))
        ids = scene.next_batch(step + 1)
        died = rng.choice(["", "", "", "trainer", "both before the step", "both after the step"])
        if died != "both before the step":
            newest += 1
            scene.lineage.add(newest, step + 1, version)
            account = StepTrained(term, step + 1, tuple(ids), {})
            if died != "both after the step":  # else its account never arrived
                scene.table.train(ids, step + 1, version)
            version, step, done = newest, step + 1, account
            if rng.random() < 0.4:
                saved = (version, step, done)
                scene.table.commit(step)
        if died.startswith("both"):
            scene.kill()
        if died:
            term += 1
            base, step, done = saved
            newest += 1
            version = newest
            scene.lineage.add(version, step, base)
    scene.recovery.settle(RequestBatch("t", term, version, step, done))
    rows = scene.ledger.groups("trained", "committed")
    counts = Counter((row.epoch, row.prompt_id) for row in rows)
    assert counts == {(epoch, f"p{i}"): 1 for epoch in range(3) for i in range(5)}
    scene.stored.close()
    scene.ledger.close()


def take_steps(scene: Scene, steps: range, size: int) -> None:
    """Train batches, each on the weights that the last one made."""
    for step in steps:
        version = scene.newest
        ids = scene.batch(step, size)
        scene.table.train(ids, step, version)
        scene.newest += 1
        scene.lineage.add(scene.newest, step, version)


@pytest.mark.parametrize("size", [2, 5, 7])
def test_a_resume_from_any_step_also_at_the_end_of_an_epoch(tmp_path: Path, size: int) -> None:
    """Five prompts, and batches that end before the epoch does, with it, and after it."""
    for saved in range(-(-15 // size)):
        scene = Scene(tmp_path / f"{saved}" / "ledger.sqlite", num_versions=1)
        take_steps(scene, range(1, saved + 1), size)
        scene.table.commit(saved)
        base = scene.newest
        take_steps(scene, range(saved + 1, saved + 3), size)  # lost
        scene.claim(size)  # in flight
        scene.kill()
        scene.newest += 1
        scene.lineage.add(scene.newest, saved, base)
        scene.recovery.settle(scene.request(2, scene.newest))
        num_steps = max(saved + 3, -(-15 // size))
        take_steps(scene, range(saved + 1, num_steps + 1), size)
        rows = scene.ledger.groups("trained", "committed")
        counts = Counter((row.epoch, row.prompt_id) for row in rows)
        assert counts.total() == num_steps * size
        assert set(counts.values()) == {1}
        assert {(epoch, f"p{i}") for epoch in range(3) for i in range(5)} <= set(counts)
        scene.ledger.close()
