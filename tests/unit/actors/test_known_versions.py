from __future__ import annotations

import pytest
from tests.helpers.training import make_groups

from ratchet.actors.known_versions import KnownVersions
from ratchet.errors import VersionError
from ratchet.messages import GroupFinished
from ratchet.types import RolloutStats, VersionRecord


def record(version: int) -> VersionRecord:
    return VersionRecord(version, 1, version, version - 1 if version else None, "live")


def finish(name: str) -> GroupFinished:
    return GroupFinished(name, "a", make_groups(1)[0], RolloutStats(name, "a"))


def test_a_version_is_asked_for_once_until_the_answer_is_there() -> None:
    known = KnownVersions()
    assert known.to_ask((1, 2)) == (1, 2)
    assert known.to_ask((2, 3)) == (3,)
    known.answered((1, 2), [record(1), record(2)])
    assert known.to_ask((1, 3)) == (1,)
    assert known.lineage.unknown((2,)) == (0,)


def test_an_answer_frees_every_finish_that_waits_once_and_in_order() -> None:
    known = KnownVersions()
    known.learn([record(0)])
    parked = [finish("r0"), finish("r1")]
    for message in parked:
        known.park(message)
    assert known.answered((1,), [record(1)]) == parked
    assert known.answered((2,), [record(2)]) == []
    assert known.lineage.unknown((2,)) == ()


def test_a_number_that_nobody_reserved_is_an_error_and_names_it() -> None:
    known = KnownVersions()
    known.park(finish("r0"))
    with pytest.raises(VersionError, match=r"versions \[8\] generated tokens but were never"):
        known.answered((1, 8), [record(1)])


def test_learning_the_same_again_is_fine_and_another_story_is_not() -> None:
    known = KnownVersions()
    known.learn([record(0), record(1)])
    known.learn([record(1)])
    with pytest.raises(ValueError, match="version 1 is known"):
        known.learn([VersionRecord(1, 1, 5, 0, "live")])
