from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.staleness import Lineage, Position, UnknownVersion
from ratchet.types import Packed, Rollout, RolloutGroup, VersionRecord, VersionSpan


def record(version: int, step: int, parent: int | None) -> VersionRecord:
    return VersionRecord(version, term=1, step=step, parent=parent, state="live")


def line(length: int) -> Lineage:
    return Lineage(record(v, v, v - 1 if v else None) for v in range(length))


#   0 - 1 - 2 - 3 - 4        steps 0..4
#            \
#             5 - 6          restored from 2: steps 3, 4
BRANCHED = Lineage(
    [
        *(record(v, v, v - 1 if v else None) for v in range(5)),
        record(5, 3, 2),
        record(6, 4, 5),
    ]
)


@pytest.mark.parametrize(
    ("version", "position", "expected"),
    [
        (6, Position(6, 4), 0),
        (6, Position(6, 5), 1),  # a step taken, not yet published
        (5, Position(6, 4), 1),
        (2, Position(6, 4), 2),
        (0, Position(6, 4), 4),
        (4, Position(6, 4), 4),  # two steps down the abandoned branch, two up the new one
        (3, Position(5, 3), 2),
        (6, Position(4, 4), 4),
        (0, Position(0, 0), 0),
    ],
)
def test_staleness_is_the_path_between_policy_and_trainer(
    version: int, position: Position, expected: int
) -> None:
    assert BRANCHED.staleness(version, position) == expected


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 3))
def test_on_an_unbroken_line_staleness_is_the_difference(
    version: int, trainer: int, ahead: int
) -> None:
    position = Position(trainer, trainer + ahead)
    if version <= trainer:
        assert line(41).staleness(version, position) == trainer + ahead - version


@st.composite
def trees(draw: st.DrawFn) -> list[VersionRecord]:
    records = [record(0, 0, None)]
    for version in range(1, draw(st.integers(1, 30))):
        parent = draw(st.sampled_from(records))
        records.append(record(version, parent.step + draw(st.integers(0, 2)), parent.version))
    return records


@given(trees(), st.data())
def test_staleness_is_never_negative_and_zero_only_at_the_same_weights(
    records: list[VersionRecord], data: st.DataObject
) -> None:
    lineage = Lineage(records)
    left, right = (data.draw(st.sampled_from(records)) for _ in range(2))
    there = lineage.staleness(left.version, Position(right.version, right.step))
    back = lineage.staleness(right.version, Position(left.version, left.step))
    assert there == back >= abs(left.step - right.step)


def test_what_is_not_known_is_not_judged() -> None:
    lineage = Lineage([record(0, 0, None), record(4, 4, 3)])
    assert lineage.unknown([0, 4, 7]) == (3, 7)
    with pytest.raises(UnknownVersion):
        lineage.staleness(7, Position(0, 0))
    with pytest.raises(UnknownVersion):
        lineage.staleness(0, Position(4, 4))


def test_a_version_never_changes() -> None:
    lineage = line(3)
    lineage.add(2, 2, 1)
    with pytest.raises(ValueError, match="version 2 is known"):
        lineage.add(2, 3, 1)
    with pytest.raises(ValueError, match="cannot follow"):
        lineage.add(9, 1, 2)
    with pytest.raises(ValueError, match="cannot follow"):
        lineage.add(5, 7, 6)
    assert 9 not in lineage
    with pytest.raises(ValueError, match="lies before"):
        lineage.staleness(0, Position(2, 1))


def test_two_trees_have_nothing_in_common() -> None:
    lineage = Lineage([record(0, 0, None), record(1, 0, None)])
    with pytest.raises(ValueError, match="no common ancestor"):
        lineage.staleness(0, Position(1, 0))


def test_a_group_is_as_stale_as_its_oldest_token() -> None:
    def rollout(*spans: VersionSpan) -> Rollout:
        tokens = spans[-1].end
        return Rollout(
            Packed.of([1], "int32"),
            Packed.of([1] * tokens, "int32"),
            Packed.of([0.0] * tokens, "float32"),
            Packed.of([1] * tokens, "uint8"),
            spans,
            "stop",
            1.0,
            0,
        )

    group = RolloutGroup(
        0,
        0,
        "p",
        0,
        (rollout(VersionSpan(4, 0, 3)), rollout(VersionSpan(2, 0, 1), VersionSpan(3, 1, 4))),
    )
    assert group.versions == (2, 3, 4)
    assert line(6).group_staleness(group, Position(5, 5)) == 3


def spanned(*spans: tuple[int, int], mask: list[int] | None = None) -> Rollout:
    """A rollout of spans (version, tokens)."""
    ends = list(itertools.accumulate(size for _, size in spans))
    return Rollout(
        Packed.of([1], "int32"),
        Packed.of([1] * ends[-1], "int32"),
        Packed.of([0.0] * ends[-1], "float32"),
        Packed.of([1] * ends[-1] if mask is None else mask, "uint8"),
        tuple(VersionSpan(v, e - n, e) for (v, n), e in zip(spans, ends, strict=True)),
        "stop",
        1.0,
        0,
    )


def masks(group: RolloutGroup) -> list[list[int]]:
    return [list(rollout.loss_mask.data) for rollout in group.rollouts]


def test_spans_past_the_bound_are_masked_and_the_group_stays_as_it_was() -> None:
    group = RolloutGroup(0, 0, "p", 0, (spanned((1, 2), (3, 1), (2, 1)), spanned((0, 2))))
    left = line(6).mask_stale(group, Position(5, 5), 2)
    assert left is not None
    assert masks(left) == [[0, 0, 1, 0], [0, 0]]
    assert masks(group) == [[1] * 4, [1] * 2]
    assert left.versions == group.versions  # who made which token is not forgotten


def test_a_group_within_the_bound_is_returned_as_it_is() -> None:
    group = RolloutGroup(0, 0, "p", 0, (spanned((3, 2)), spanned((5, 1), mask=[0])))
    assert line(6).mask_stale(group, Position(5, 5), 2) is group


@pytest.mark.parametrize(
    "rollout", [spanned((1, 2)), spanned((1, 1), (5, 2), mask=[1, 0, 0])], ids=str
)
def test_a_group_with_nothing_left_to_train_is_none(rollout: Rollout) -> None:
    group = RolloutGroup(0, 0, "p", 0, (rollout,))
    assert line(6).mask_stale(group, Position(5, 5), 2) is None


def test_tokens_of_an_abandoned_branch_are_masked_by_their_distance() -> None:
    group = RolloutGroup(0, 0, "p", 0, (spanned((4, 1), (5, 1), (2, 1), (0, 1)),))
    left = BRANCHED.mask_stale(group, Position(6, 4), 2)
    assert left is not None
    assert masks(left) == [[0, 1, 1, 0]]


def test_masking_needs_every_version() -> None:
    with pytest.raises(UnknownVersion):
        line(3).mask_stale(RolloutGroup(0, 0, "p", 0, (spanned((7, 1)),)), Position(2, 2), 9)


@given(st.lists(st.integers(0, 9), unique=True), st.data())
def test_what_is_missing_is_found_however_often_it_was_asked(
    order: list[int], data: st.DataObject
) -> None:
    parents = {v: data.draw(st.integers(0, v - 1)) if v else None for v in range(10)}
    lineage = Lineage()
    for count, added in enumerate(order, 1):
        lineage.add(added, added, parents[added])
        asked = data.draw(st.integers(0, 9))
        first: int | None = asked
        while first in order[:count]:
            first = parents[first]
        assert lineage.unknown([asked]) == (() if first is None else (first,))


def test_asking_again_costs_the_same_in_a_long_run() -> None:
    class Counted(dict):  # type: ignore[type-arg]
        reads = 0

        def __contains__(self, key: object) -> bool:
            self.reads += 1
            return super().__contains__(key)

    lineage = line(1000)
    nodes = lineage._nodes = Counted(lineage._nodes)
    assert lineage.unknown([999]) == ()
    assert nodes.reads == 1000
    for version in (999, 500):
        assert lineage.unknown([version]) == ()
    lineage.add(1000, 1000, 999)
    assert lineage.unknown([1000]) == ()
    assert nodes.reads < 1010
