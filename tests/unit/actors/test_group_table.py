"""A table of groups by example: leases, budgets, and what the ledger keeps."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec
import pytest
from tests.helpers.group_tables import WORKERS, group_of, make_table

from ratchet.actors.entry import Entry
from ratchet.actors.group_table import GroupTable


def finish(table: GroupTable, entry: Entry) -> None:
    table.finish(entry, group_of(entry), (0,))


def test_a_lease_has_ended_at_its_end_and_not_before() -> None:
    table, _ = make_table()
    first, second = (table.claim(("r0", "a"), until=end) for end in (3.0, 4.0))
    assert table.in_flight.next_end() == 3.0
    assert table.in_flight.overdue(2.9) == []
    assert table.in_flight.overdue(3.0) == [first]
    assert table.in_flight.overdue(9.0) == [first, second]


def test_retries_and_reissues_have_budgets_of_their_own() -> None:
    table, ledger = make_table(max_reissues=1)
    table.reissue(table.claim(("r0", "a"), until=1.0), "worker_died")
    table.retry(table.claim(("r0", "a"), until=1.0), "reward")
    entry = table.claim(("r0", "a"), until=1.0)
    assert (entry.group_id, entry.attempt, entry.retries, entry.reissues) == (0, 2, 1, 1)
    table.reissue(entry, "lease_expired")
    assert ledger.reasons() == {"lease_expired": 1}
    assert table.take_window().reissued == {"worker_died": 1}  # dropped is not issued again


def test_a_retry_begins_from_the_pristine_prompt() -> None:
    table, _ = make_table()
    entry = table.claim(("r0", "a"), until=1.0)
    prompt = entry.prompt
    finish(table, entry)
    table.mask(entry, "stale")
    table.retry(entry, "stale")
    again = table.claim(("r1", "a"), until=2.0)
    assert (again.prompt, again.group, again.versions) == (prompt, None, ())
    assert again.masked == ""
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
        table.rejected(0)
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
    table.retry(table.rejected(0), "non_finite")
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


@pytest.mark.parametrize("rewards", [(0.1,), (0.1, 0.1, 0.1), (0.0, 1.0), (1e-9, 3.5, -2.0, 7.25)])
def test_the_ledger_keeps_the_spread_of_the_rewards(rewards: tuple[float, ...]) -> None:
    table, ledger = make_table()
    entry = table.claim(WORKERS[0], until=1.0)
    group = group_of(entry)
    rollouts = tuple(
        msgspec.structs.replace(group.rollouts[0], reward=reward, trajectory=None)
        for reward in rewards
    )
    table.finish(entry, msgspec.structs.replace(group, rollouts=rollouts), (0,))
    row = ledger.group(entry.group_id)
    assert row is not None
    assert row.reward_mean == pytest.approx(statistics.fmean(rewards), rel=1e-12)
    assert row.reward_std == pytest.approx(statistics.pstdev(rewards), rel=1e-12, abs=1e-15)
