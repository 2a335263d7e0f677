from __future__ import annotations

from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ratchet.actors.judgement import Judgement, judge, mark
from ratchet.staleness import Lineage, Position
from ratchet.types import Packed, Rollout, RolloutGroup, VersionRecord, VersionSpan

LINE = Lineage(
    VersionRecord(v, term=1, step=v, parent=v - 1 if v else None, state="live") for v in range(6)
)
AT_5 = Position(5, 5)


def rollout(*versions: int, mask: Sequence[int] | None = None) -> Rollout:
    """A rollout with one token of each of `versions`."""
    size = len(versions)
    return Rollout(
        prompt_ids=Packed.of([1], "int32"),
        completion_ids=Packed.of([7] * size, "int32"),
        behavior_logprobs=Packed.of([-1.0] * size, "float32"),
        loss_mask=Packed.of([1] * size if mask is None else mask, "uint8"),
        spans=tuple(VersionSpan(v, i, i + 1) for i, v in enumerate(versions)),
        finish_reason="stop",
        reward=0.0,
        seed=0,
    )


def group(group_id: int, *rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(group_id, 0, "p", 0, rollouts)


def masks(group: RolloutGroup) -> list[list[int]]:
    return [list(rollout.loss_mask.data) for rollout in group.rollouts]


def judged(*groups: RolloutGroup, mask: bool = True, bound: int = 2) -> Judgement:
    return judge(groups, LINE, AT_5, bound, mask=mask)


FRESH = group(1, rollout(3, 4), rollout(5))
HALF = group(2, rollout(2, 3), rollout(2, 2), rollout(4))
OLD = group(3, rollout(1), rollout(2, 2))
EMPTY = group(4, rollout(5, mask=[0]), rollout(5, 5, mask=[0, 0]))


def test_within_the_bound_nothing_changes() -> None:
    found = judged(FRESH)
    assert found == Judgement((FRESH,), {})
    assert found.groups[0] is FRESH
    assert found.trained == (FRESH,)


def test_tokens_past_the_bound_are_masked_in_a_group_of_its_own() -> None:
    found = judged(FRESH, HALF, OLD)
    assert found.rejected == {3: "stale"}
    assert [each.group_id for each in found.groups] == [1, 2]
    assert masks(found.groups[1]) == [[0, 1], [0, 0], [1]]
    assert (found.masked_groups, found.masked_tokens) == (1, 3)
    assert masks(HALF) == [[1, 1], [1, 1], [1]]
    assert found.trained == found.groups


def test_without_masking_one_old_token_rejects_the_group() -> None:
    found = judged(FRESH, HALF, OLD, mask=False)
    assert found == Judgement((FRESH,), {2: "stale", 3: "stale"})


def test_tokens_that_were_masked_before_are_not_counted_again() -> None:
    found = judged(group(2, rollout(2, 2, 3, mask=[0, 1, 1])))
    assert masks(found.groups[0]) == [[0, 0, 1]]
    assert found.masked_tokens == 1


def test_a_fresh_token_that_is_not_trained_keeps_no_group() -> None:
    assert judged(group(2, rollout(2, 5, mask=[1, 0]))).rejected == {2: "stale"}


def test_a_group_that_came_with_nothing_to_train_is_not_called_stale() -> None:
    found = judged(FRESH, EMPTY)
    assert found.rejected == {4: "no_tokens"}
    assert found.groups == (FRESH, EMPTY)
    assert found.trained == (FRESH,)


def test_marked_samples_are_out_and_the_batch_keeps_its_shape() -> None:
    found = mark(judged(FRESH, HALF), [[True, False], [True, True, True]])
    assert [masks(each) for each in found.groups] == [[[0, 0], [1]], [[0, 0], [0, 0], [0]]]
    assert found.rejected == {2: "filter:batch"}
    assert [each.group_id for each in found.trained] == [1]
    assert found.marked_samples == 4
    assert (found.masked_groups, found.masked_tokens) == (1, 3)
    assert masks(FRESH) == [[1, 1], [1]]


def test_a_group_keeps_the_reason_that_it_was_rejected_for() -> None:
    found = mark(judged(EMPTY, OLD), [[True, True]])
    assert found.rejected == {3: "stale", 4: "no_tokens"}


ROLLOUTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1)), min_size=1, max_size=5).map(
    lambda tokens: rollout(*(v for v, _ in tokens), mask=[m for _, m in tokens])
)


@given(st.lists(ROLLOUTS, min_size=1, max_size=4), st.integers(0, 5), st.data())
def test_what_is_trained_is_within_the_bound_and_unmarked(
    rollouts: list[Rollout], bound: int, data: st.DataObject
) -> None:
    before = group(1, *rollouts)
    original = msgspec.msgpack.encode(before)
    found = judged(before, bound=bound)
    marks = [[data.draw(st.booleans()) for _ in each.rollouts] for each in found.groups]
    found = mark(found, marks)
    expected = [
        int(kept == 1 and 5 - span.version <= bound and not (marks and marks[0][index]))
        for index, each in enumerate(rollouts)
        for kept, span in zip(each.loss_mask.data, each.spans, strict=True)
    ]
    left = [bit for each in found.trained for row in masks(each) for bit in row]
    assert left == (expected if any(expected) else [])
    assert bool(found.trained) != bool(found.rejected)
    assert msgspec.msgpack.encode(before) == original
