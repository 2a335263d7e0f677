from collections.abc import Callable

import msgspec
import pytest
from tests.helpers.ledger_rows import RESULT, finished

from ratchet.storage.groups import GroupEvent, GroupRow
from ratchet.storage.ledger import GroupLedger, LedgerError


def test_a_whole_life() -> None:
    ledger = GroupLedger.open(None)
    group_id = finished(ledger)
    ledger.batch([group_id], 5, {group_id: 1}, 4.0)
    ledger.train([group_id], 5, 4, 5.0)
    assert ledger.group(group_id) == GroupRow(
        group_id=0,
        prompt_id="p",
        epoch=0,
        attempt=0,
        retries=0,
        state="trained",
        reason=None,
        worker="rollout-0",
        min_version=2,
        max_version=3,
        staleness=1,
        trained_step=5,
        trained_version=4,
        reward_mean=0.25,
        reward_std=0.5,
        num_tokens=64,
        num_rollouts=8,
        issued_at=1.0,
        claimed_at=2.0,
        finished_at=3.0,
        trained_at=5.0,
        changed_at=5.0,
    )
    assert ledger.events(group_id) == (
        GroupEvent(0, 1.0, "issued", None),
        GroupEvent(0, 2.0, "claimed", "rollout-0"),
        GroupEvent(0, 3.0, "finished", None),
        GroupEvent(0, 4.0, "batched", "5"),
        GroupEvent(0, 5.0, "trained", "5"),
    )


def test_a_checkpoint_commits_what_was_trained_up_to_its_step() -> None:
    ledger = GroupLedger.open(None)
    ids = [finished(ledger) for _ in range(3)]
    for step, group_id in enumerate(ids, start=1):
        ledger.batch([group_id], step, {group_id: 0}, 4.0)
        if step < 3:
            ledger.train([group_id], step, step - 1, 5.0)
    assert ledger.commit(1, 6.0) == (ids[0],)
    assert ledger.commit(3, 7.0) == (ids[1],)  # the third is not trained yet
    assert ledger.commit(3, 8.0) == ()
    assert ledger.committed_step() == 2
    assert [row.state for row in ledger.groups()] == ["committed", "committed", "batched"]
    assert ledger.events(ids[1])[-1] == GroupEvent(ids[1], 7.0, "committed", "2")


def test_a_committed_step_can_still_be_lost() -> None:
    """To a resume from an older checkpoint."""
    ledger = GroupLedger.open(None)
    group_id = finished(ledger)
    ledger.batch([group_id], 5, {group_id: 1}, 4.0)
    ledger.train([group_id], 5, 4, 5.0)
    ledger.commit(5, 6.0)
    assert ledger.trained_steps() == ((4, 5),)
    (lost,) = ledger.lose(4, 5, "step_lost", 7.0)
    assert (lost.state, lost.attempt, lost.trained_step) == ("issued", 1, None)
    assert ledger.committed_step() == 0


def test_a_lost_group_is_queued_again_without_a_worker() -> None:
    ledger = GroupLedger.open(None)
    group_id = finished(ledger)
    with pytest.raises(LedgerError, match="state = 'issued'"):
        ledger.finish(group_id, 0, **RESULT, now=4.0, requeued=True)
    ledger.retry(group_id, 0, "buffer_died", 4.0)
    ledger.finish(group_id, 1, **RESULT, now=5.0, requeued=True)
    row = ledger.group(group_id)
    assert row is not None
    assert (row.state, row.attempt, row.reason, row.worker) == ("finished", 1, None, None)
    assert (row.min_version, row.finished_at) == (2, 5.0)
    assert [(e.event, e.detail) for e in ledger.events(group_id)[-2:]] == [
        ("retried", "buffer_died"),
        ("requeued", None),
    ]


def test_issued_to_a_worker_is_issued_and_claimed() -> None:
    ledger = GroupLedger.open(None)
    in_two, at_once = ledger.issue("p", 0, 1.0), ledger.issue("p", 0, 1.0, to="rollout-0")
    ledger.claim(in_two, 0, "rollout-0", 1.0)
    one, other = ledger.groups()
    assert other == msgspec.structs.replace(one, group_id=at_once)
    lives = [
        [event[1:] for event in map(msgspec.structs.astuple, ledger.events(i))]
        for i in (in_two, at_once)
    ]
    assert lives == [[(1.0, "issued", None), (1.0, "claimed", "rollout-0")]] * 2


def test_a_retry_forgets_the_attempt_and_the_events_remember_it() -> None:
    ledger = GroupLedger.open(None)
    group_id = finished(ledger)
    ledger.batch([group_id], 5, {group_id: 1}, 4.0)
    ledger.retry(group_id, 0, "stale", 5.0)
    row = ledger.group(group_id)
    assert row is not None
    assert (row.state, row.attempt, row.reason) == ("issued", 1, "stale")
    kept = {"group_id", "prompt_id", "epoch", "attempt", "state", "reason", "issued_at", "retries"}
    forgotten = set(GroupRow.__struct_fields__) - kept - {"changed_at"}
    assert {name: getattr(row, name) for name in forgotten} == dict.fromkeys(forgotten)
    ledger.claim(group_id, 1, "rollout-1", 6.0)
    row = ledger.group(group_id)
    assert row is not None
    assert row.reason is None
    assert [(event.event, event.detail) for event in ledger.events(group_id)][-2:] == [
        ("retried", "stale"),
        ("claimed", "rollout-1"),
    ]


def test_a_mask_is_told_with_its_reason_and_the_group_stays_finished() -> None:
    ledger = GroupLedger.open(None)
    group_id = finished(ledger)
    ledger.mask(group_id, "stale", 4.0)
    row = ledger.group(group_id)
    assert row is not None
    assert (row.state, row.reason) == ("finished", "stale")
    assert [(e.event, e.detail) for e in ledger.events(group_id)][-1] == ("masked", "stale")
    assert ledger.reasons() == {}
    ledger.batch([group_id], 1, {group_id: 0}, 5.0)
    before = ledger.events(group_id)
    with pytest.raises(LedgerError, match="group 0 is batched"):
        ledger.mask(group_id, "stale", 6.0)
    assert ledger.events(group_id) == before


def test_a_late_finish_of_an_earlier_attempt_is_refused() -> None:
    ledger = GroupLedger.open(None)
    group_id = ledger.issue("p", 0, 1.0)
    ledger.claim(group_id, 0, "rollout-0", 2.0)
    ledger.retry(group_id, 0, "lease", 3.0)
    ledger.claim(group_id, 1, "rollout-1", 4.0)
    with pytest.raises(LedgerError, match="group 0 is claimed at attempt 1"):
        ledger.finish(group_id, 0, **RESULT, now=5.0)
    ledger.finish(group_id, 1, **RESULT, now=5.0)


@pytest.mark.parametrize("change", ["batch", "train"])
@pytest.mark.parametrize("bad", [[0, 9], [0, 2], [0, 1, 0]])
def test_a_batch_moves_whole_or_not_at_all(change: str, bad: list[int]) -> None:
    """9 was never issued, 2 is in an earlier state, 0 is named twice."""
    ledger = GroupLedger.open(None)
    for _ in range(2):
        finished(ledger)
    if change == "train":
        ledger.batch([0, 1], 7, {0: 0, 1: 0}, 4.0)
    ledger.issue("p", 0, 1.0)
    moves: dict[str, Callable[[list[int]], None]] = {
        "batch": lambda ids: ledger.batch(ids, 7, dict.fromkeys(ids, 0), 5.0),
        "train": lambda ids: ledger.train(ids, 7, 3, 5.0),
    }
    before = ledger.groups()
    with pytest.raises(LedgerError):
        moves[change](bad)
    assert ledger.groups() == before
    assert len(ledger.events(0)) == (4 if change == "train" else 3)
    moves[change]([0, 1])


def test_a_batch_costs_what_its_groups_cost_however_many_they_are() -> None:
    def steps_of_sqlite(num_groups: int) -> int:
        ledger = GroupLedger.open(None)
        ids = [finished(ledger) for _ in range(num_groups)]
        steps: list[None] = []
        ledger._sql.set_progress_handler(lambda: steps.append(None), 10)
        ledger.batch(ids, 7, dict.fromkeys(ids, 0), 4.0)
        ledger.train(ids, 7, 3, 5.0)
        return len(steps)

    assert steps_of_sqlite(1000) < 11 * steps_of_sqlite(100)


def test_only_the_step_of_the_batch_trains_it() -> None:
    ledger = GroupLedger.open(None)
    group_id = finished(ledger)
    ledger.batch([group_id], 7, {group_id: 0}, 4.0)
    with pytest.raises(LedgerError, match="is batched at attempt 0"):
        ledger.train([group_id], 8, 3, 5.0)
    ledger.train([group_id], 7, 3, 5.0)


def test_counts_and_reasons() -> None:
    ledger = GroupLedger.open(None)
    assert sum(ledger.counts().values()) == 0
    for reason in ("stale", "stale", "zero_spread", None):
        group_id = finished(ledger)
        if reason is not None:
            ledger.drop(group_id, reason, 4.0)
    ledger.issue("p", 0, 1.0)
    assert ledger.counts() == {
        "issued": 1,
        "claimed": 0,
        "finished": 1,
        "batched": 0,
        "trained": 0,
        "committed": 0,
        "dropped": 3,
    }
    assert ledger.reasons() == {"stale": 2, "zero_spread": 1}


def test_rows_by_state() -> None:
    ledger = GroupLedger.open(None)
    for _ in range(3):
        finished(ledger)
    ledger.drop(1, "stale", 4.0)
    assert [row.group_id for row in ledger.groups()] == [0, 1, 2]
    assert [row.group_id for row in ledger.groups("finished")] == [0, 2]
    assert [row.group_id for row in ledger.groups("dropped", "issued")] == [1]
    assert ledger.group(3) is None


def test_a_result_that_is_not_a_number_is_none_again() -> None:
    ledger = GroupLedger.open(None)
    group_id = ledger.issue("p", 0, 1.0)
    ledger.claim(group_id, 0, "rollout-0", 2.0)
    ledger.finish(group_id, 0, **RESULT | {"reward_std": float("nan")}, now=3.0)
    row = ledger.group(group_id)
    assert row is not None
    assert row.reward_std is None
