"""A checkpoint of a line that was left is nobody's to go on from, whenever it is finished."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratchet.errors import StaleTerm, UserError
from ratchet.storage.checkpoint import CheckpointFacts
from ratchet.storage.checkpoints import Checkpoints, Disk
from ratchet.storage.starts import Start, Starts, goes_on


def facts(version: int, term: int) -> CheckpointFacts:
    return CheckpointFacts("r1", version, version, term, "", None, 0.0)


def write(checkpoints: Checkpoints, version: int, term: int) -> None:
    (checkpoints.begin(version) / "state").write_text(str(version))
    checkpoints.finish(facts(version, term))


def versions(checkpoints: Checkpoints) -> list[int]:
    return [each.facts.version for each in checkpoints.whole()]


@pytest.mark.parametrize(
    ("term", "version", "expected"),
    [
        (1, 3, True),  # where the second one began
        (1, 2, True),
        (1, 4, False),  # given back, and trained again since
        (2, 5, True),
        (2, 9, False),
        (3, 9, True),
    ],
)
def test_what_every_later_term_has_gone_on_from_counts(
    term: int, version: int, expected: bool
) -> None:
    starts = (Start(1, None, 0), Start(2, 3, 3), Start(3, 6, 6))
    assert goes_on(term, version, starts) is expected


def test_nothing_of_before_counts_once_a_term_began_anew() -> None:
    assert not goes_on(1, 3, (Start(1, None, 0), Start(2, None, 0)))


def test_starts_are_kept_and_can_be_taken_back(tmp_path: Path) -> None:
    starts = Starts(tmp_path / "checkpoints")
    assert (starts.newest(), starts.all()) == (0, ())
    starts.record(Start(1, None, 0))
    starts.record(Start(12, 9, 8))
    assert Starts(tmp_path / "checkpoints").all() == (Start(1, None, 0), Start(12, 9, 8))
    assert starts.newest() == 12
    starts.withdraw(12)
    assert starts.newest() == 1
    (tmp_path / "checkpoints" / "term-00000001.json").write_text("{")
    with pytest.raises(UserError, match=r"term-00000001\.json cannot be read"):
        starts.all()


def test_a_checkpoint_of_a_line_that_was_left_is_passed_over_and_removed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=9)
    checkpoints.starts.record(Start(1, None, 0))
    for version in (3, 6, 9):
        write(checkpoints, version, 1)
    checkpoints.starts.record(Start(2, 3, 3))  # `ratchet resume --step 3`
    assert versions(checkpoints) == [3]
    with pytest.raises(UserError, match="no checkpoint of step 9"):
        checkpoints.find(9)
    write(checkpoints, 12, 2)
    assert versions(checkpoints) == [3, 12]
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == [
        "version-00000003", "version-00000012",
    ]  # fmt: skip


def test_a_trainer_that_was_replaced_writes_none_and_removes_none(tmp_path: Path) -> None:
    zombie = Checkpoints(tmp_path, keep=1)
    write(zombie, 3, 1)
    (zombie.begin(6) / "state").write_text("6")
    leader = Checkpoints(tmp_path, keep=1)
    leader.starts.record(Start(2, 3, 3))
    with pytest.raises(StaleTerm, match="version 6 is of term 1, and term 2 has begun"):
        zombie.finish(facts(6, 1))
    assert versions(leader) == [3]


def test_one_that_stands_still_in_the_middle_does_no_harm_either(tmp_path: Path) -> None:
    leader = Checkpoints(tmp_path, keep=1)

    class Stopped(Disk):
        def rename(self, old: Path, new: Path) -> None:
            leader.starts.record(Start(2, 3, 3))
            super().rename(old, new)

    write(leader, 3, 1)
    zombie = Checkpoints(tmp_path, keep=1, disk=Stopped())
    (zombie.begin(6) / "state").write_text("6")
    with pytest.raises(StaleTerm):
        zombie.finish(facts(6, 1))
    assert versions(leader) == [3]
    assert (tmp_path / "version-00000006").exists()  # whole, and of no use
