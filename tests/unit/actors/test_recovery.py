"""Kill the buffer, the trainer or both anywhere: each prompt counts once an epoch."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from tests.helpers.recovery_scene import Scene

from ratchet.errors import TaskError
from ratchet.messages import RequestBatch, StepTrained
from ratchet.types import Prompt


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
