import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ratchet.algorithms.advantages import mean_advantages, std_advantages

REWARDS = hnp.arrays(
    np.float64, st.integers(1, 16), elements=st.floats(-100, 100, allow_subnormal=False)
)


def test_mean_by_hand() -> None:
    rewards = np.array([0.0, 1.0, 1.0, 2.0])
    assert mean_advantages(rewards).tolist() == [-1.0, 0.0, 0.0, 1.0]


def test_std_by_hand_is_the_sample_deviation() -> None:
    # squares sum to 2, divided by 4 - 1
    expected = 1.0 / (np.sqrt(2.0 / 3.0) + 1e-4)
    assert std_advantages(np.array([0.0, 1.0, 1.0, 2.0])).tolist() == pytest.approx(
        [-expected, 0.0, 0.0, expected], abs=1e-12
    )


@pytest.mark.parametrize("advantage", [mean_advantages, std_advantages])
@pytest.mark.parametrize("reward", [0.0, 0.1, -3.7, 1e9])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_equal_rewards_give_exact_zeros(advantage, reward: float, size: int) -> None:  # noqa: ANN001
    assert advantage(np.full(size, reward)).tolist() == [0.0] * size


@given(REWARDS)
def test_advantages_are_finite_centred_and_keep_the_order(rewards: np.ndarray) -> None:
    for advantage in (mean_advantages, std_advantages):
        values = advantage(rewards)
        assert np.isfinite(values).all()
        assert abs(values.sum()) < 1e-6
        order = np.argsort(rewards, kind="stable")
        assert (np.diff(values[order]) >= 0).all()


@given(REWARDS, st.floats(-50, 50))
def test_a_constant_added_to_all_rewards_changes_nothing(
    rewards: np.ndarray, constant: float
) -> None:
    assert mean_advantages(rewards + constant) == pytest.approx(mean_advantages(rewards), abs=1e-9)


def test_the_rewards_are_left_as_they_were() -> None:
    rewards = np.array([1.0, 2.0])
    std_advantages(rewards)
    assert rewards.tolist() == [1.0, 2.0]
