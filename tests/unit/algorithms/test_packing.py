import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.algorithms.advantages import Advantage, Floats, mean_advantages, std_advantages
from ratchet.algorithms.packing import (
    Row,
    pad,
    plan_micro_batches,
    reference_row,
    rollout_rows,
    trained_tokens,
)
from ratchet.types import Packed, Rollout, RolloutGroup, VersionSpan


def row(prompt: list[int], completion: list[int], mask: list[int] | None = None) -> Row:
    size = len(completion)
    return Row(
        Packed.of(prompt, "int32"),
        Packed.of(completion, "int32"),
        Packed.of([-0.5 * (i + 1) for i in range(size)], "float32"),
        Packed.of(mask or [1] * size, "uint8"),
        0.25,
    )


def group(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(7, 0, "p", 0, rollouts)


def rollout(prompt: list[int], completion: list[int], reward: float, **changes: Packed) -> Rollout:
    size = len(completion)
    fields = {
        "prompt_ids": Packed.of(prompt, "int32"),
        "completion_ids": Packed.of(completion, "int32"),
        "behavior_logprobs": Packed.of(np.full(size, -1.0), "float32"),
        "loss_mask": Packed.of(np.ones(size), "uint8"),
    }
    return Rollout(
        **(fields | changes),
        spans=(VersionSpan(0, 0, size),),
        finish_reason="stop",
        reward=reward,
        seed=0,
    )


TOKENS = st.lists(st.integers(3, 100), min_size=1, max_size=9)
ROWS = st.lists(st.tuples(TOKENS, TOKENS).map(lambda pair: row(*pair)), min_size=1, max_size=20)


def test_padded_by_hand() -> None:
    batch = pad([row([5, 6], [7, 8], [1, 0]), row([9], [10])])
    assert batch.input_ids.tolist() == [[5, 6, 7], [9, 10, 0]]
    assert batch.targets.tolist() == [[6, 7, 8], [10, 0, 0]]
    assert batch.loss_mask.tolist() == [[False, True, False], [True, False, False]]
    assert batch.behavior_logprobs.tolist() == [[0.0, -0.5, -1.0], [-0.5, 0.0, 0.0]]
    assert batch.advantages.tolist() == [[0.25] * 3] * 2


def test_prompt_columns_are_left_out_where_all_prompts_are_long() -> None:
    batch = pad([row([5, 6, 7], [8]), row([5, 6, 7], [9, 10])])
    assert batch.targets.tolist() == [[8, 0], [9, 10]]


@given(ROWS)
def test_every_trained_token_is_predicted_once_from_its_own_past(rows: list[Row]) -> None:
    batch = pad(rows)
    num_columns = batch.targets.shape[1]
    offset = batch.input_ids.shape[1] - num_columns
    assert int(batch.loss_mask.sum()) == trained_tokens(rows)
    for index, each in enumerate(rows):
        tokens = [*each.prompt_ids.numpy().tolist(), *each.completion_ids.numpy().tolist()]
        mask = batch.loss_mask[index]
        assert batch.targets[index][mask].tolist() == each.completion_ids.numpy().tolist()
        assert (
            batch.behavior_logprobs[index][mask].tolist() == each.behavior_logprobs.numpy().tolist()
        )
        for column in mask.nonzero().flatten().tolist():
            position = offset + column
            assert batch.input_ids[index, : position + 1].tolist() == tokens[: position + 1]
            assert batch.targets[index, column].item() == tokens[position + 1]


@given(ROWS, st.integers(1, 200), st.integers(1, 4))
def test_a_plan_holds_every_row_once_within_the_limit(
    rows: list[Row], max_tokens: int, num_ranks: int
) -> None:
    plan = plan_micro_batches(rows, max_tokens, num_ranks)
    dealt = [each for shares in plan for share in shares for each in share]
    assert sorted(map(id, dealt)) == sorted(map(id, rows))
    for shares in plan:
        assert len(shares) == num_ranks
        assert shares[0]  # the first rank always has work
        for share in shares:
            if len(share) > 1:
                assert len(share) * max(each.num_tokens for each in share) <= max_tokens


@given(ROWS)
def test_one_micro_batch_where_all_fit(rows: list[Row]) -> None:
    assert len(plan_micro_batches(rows, max_tokens=20 * 18)) == 1


def test_short_rows_are_not_padded_to_long_ones() -> None:
    rows = [row([1] * n, [2]) for n in (1, 30, 1, 30, 1, 30)]
    plan = plan_micro_batches(rows, max_tokens=93)
    assert [[each.num_tokens for each in share] for (share,) in plan] == [[31] * 3, [2] * 3]


def test_rollouts_get_the_advantage_of_their_group() -> None:
    rows = rollout_rows(
        [
            group(rollout([1], [2], 0.0), rollout([1], [3], 1.0)),
            group(rollout([4], [5], 7.0), rollout([4], [6], 7.0)),
        ],
        mean_advantages,
    )
    assert [each.advantage for each in rows] == [-0.5, 0.5, 0.0, 0.0]
    assert [each.completion_ids.numpy().tolist() for each in rows] == [[2], [3], [5], [6]]


def masked(tokens: int) -> Packed:
    return Packed.of([0] * tokens, "uint8")


def test_a_rollout_without_a_trained_token_does_not_count_in_the_statistics() -> None:
    out = rollout([1], [9, 9], 100.0, loss_mask=masked(2))
    half = rollout([1], [3, 4], 1.0, loss_mask=Packed.of([0, 1], "uint8"))
    rows = rollout_rows([group(rollout([1], [2], 0.0), out, half)], mean_advantages)
    assert [each.advantage for each in rows] == [-0.5, 0.5]  # half of a rollout counts as one
    assert trained_tokens(rows) == 2


@pytest.mark.parametrize("advantage", [std_advantages, mean_advantages])
def test_the_last_rollout_that_is_left_of_a_group_has_no_advantage(advantage: Advantage) -> None:
    out = rollout([1], [9], 5.0, loss_mask=masked(1))
    (row,) = rollout_rows([group(out, rollout([1], [2], 1.0), out)], advantage)
    assert row.advantage == 0.0


def test_a_group_of_which_nothing_is_left_has_no_rows() -> None:
    def never(rewards: Floats) -> Floats:
        raise AssertionError(rewards)

    assert rollout_rows([group(rollout([1], [9], 5.0, loss_mask=masked(1)))], never) == []


def test_only_a_rollout_that_was_aborted_may_be_empty() -> None:
    empty = rollout([1], [], 0.0)
    with pytest.raises(ValueError, match="0 of completion"):
        rollout_rows([group(empty)], mean_advantages)
    aborted = msgspec.structs.replace(empty, finish_reason="abort")
    assert len(rollout_rows([group(aborted, rollout([1], [2], 1.0))], mean_advantages)) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"behavior_logprobs": Packed.of([0.0], "float32")}, "2 of completion, 1 behav"),
        ({"loss_mask": Packed.of([1, 1, 1], "uint8")}, "and 3 values of loss_mask"),
        ({"prompt_ids": Packed.of([], "int32")}, "0 tokens of prompt"),
        ({"prompt_ids": Packed.of([1], "int64")}, "as int64, int32"),
    ],
)
def test_a_malformed_rollout_is_refused(changes: dict[str, Packed], message: str) -> None:
    with pytest.raises(ValueError, match=f"group 7.*{message}"):
        rollout_rows([group(rollout([1], [2, 3], 0.0, **changes))], mean_advantages)


def test_a_reference_trains_every_completion_token() -> None:
    batch = pad([reference_row([4, 5], [6, 1])])
    assert batch.targets[batch.loss_mask].tolist() == [6, 1]


def test_an_empty_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        reference_row([4], [])


def test_a_trajectory_of_many_samples_weighs_no_more_than_one_of_one() -> None:
    several = [
        msgspec.structs.replace(rollout([5], [6], 1.0), trajectory=3, seed=seed)
        for seed in range(5)
    ]
    rows = rollout_rows([group(*several, rollout([5], [7], 0.0))], mean_advantages)
    # not 1/6 and -5/6, as they would be if samples counted
    assert [row.advantage for row in rows] == [0.5] * 5 + [-0.5]


def test_tokens_of_an_environment_are_seen_and_not_trained() -> None:
    turns = rollout(
        [5],
        [6, 7, 8, 9],
        1.0,
        loss_mask=Packed.of([1, 0, 0, 1], "uint8"),
        behavior_logprobs=Packed.of([-1.0, 0.0, 0.0, -2.0], "float32"),
    )
    rows = rollout_rows([group(turns, rollout([5], [6], 0.0))], mean_advantages)
    assert trained_tokens(rows) == 3
    batch = pad(rows)
    assert batch.input_ids.tolist()[0] == [5, 6, 7, 8]  # what is predicted depends on them
    assert batch.targets[0][batch.loss_mask[0]].tolist() == [6, 9]
    assert batch.behavior_logprobs[0][batch.loss_mask[0]].tolist() == [-1.0, -2.0]
