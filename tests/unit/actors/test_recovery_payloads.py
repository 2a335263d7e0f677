"""Finished groups come back from their payloads, and payloads go when nobody needs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.recovery_scene import Scene


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
