from __future__ import annotations

import numpy as np
import pytest
import torch

from ratchet.backends.rollout._sampling import sample, stream_of, uniforms


def draws_of(seeds: list[int], position: int) -> np.ndarray:
    streams = np.array([stream_of(seed) for seed in seeds], np.uint64)
    return uniforms(streams, np.full(len(seeds), position, np.int64))


def temperatures(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_a_draw_depends_on_seed_and_position_only() -> None:
    crowd = draws_of([7, 8, 9, -1, 2**70], 3)
    assert [draws_of([seed], 3)[0] for seed in (7, 8, 9, -1, 2**70)] == crowd.tolist()
    assert len({*crowd, *draws_of([7, 8, 9, -1, 2**70], 4)}) == 10


@pytest.mark.parametrize("axis", ["seeds", "positions"])
def test_draws_are_uniform_and_uncorrelated(axis: str) -> None:
    count = 20_000
    streams = np.array(
        [stream_of(seed if axis == "seeds" else 1) for seed in range(count)], np.uint64
    )
    positions = np.arange(count, dtype=np.int64) * (axis == "positions")
    draws = uniforms(streams, positions)
    assert 0 <= draws.min() < draws.max() < 1
    observed = np.bincount((draws * 100).astype(int), minlength=100)
    chi_square = float(((observed - count / 100) ** 2 / (count / 100)).sum())
    assert chi_square < 148.2  # 99 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.025


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_frequencies_and_logprobs_follow_the_distribution(temperature: float) -> None:
    count, vocabulary = 50_000, 12
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(0)) * 1.5
    expected = torch.log_softmax(logits / temperature, -1)
    tokens, logprobs = sample(
        logits.expand(count, -1),
        np.full(count, temperature, np.float32),
        draws_of(list(range(count)), 5),
    )
    np.testing.assert_allclose(logprobs, expected.numpy()[tokens], atol=1e-6)
    observed = np.bincount(tokens, minlength=vocabulary)
    wanted = count * expected.exp().numpy()
    chi_square = float(((observed - wanted) ** 2 / wanted).sum())
    assert chi_square < 31.3  # 11 degrees of freedom, p = 0.001


def test_a_token_of_probability_zero_is_never_sampled() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(4, -1)
    draws = np.array([0.0, 0.5 - 2**-53, 0.5, 1 - 2**-53])
    tokens, logprobs = sample(logits, temperatures(1, 1, 1, 1), draws)
    assert tokens.tolist() == [1, 1, 3, 3]
    np.testing.assert_allclose(logprobs, np.log(0.5), rtol=1e-6)


def test_the_last_draw_stays_inside_a_large_vocabulary() -> None:
    logits = torch.full((1, 100_000), -30.0)
    logits[0, 5] = 0.0
    logits[0, -1] = -torch.inf
    tokens, logprobs = sample(logits, temperatures(1), np.array([1 - 2**-53]))
    assert np.isfinite(logprobs).all()
    assert tokens[0] < 99_999


def test_temperature_zero_is_greedy_and_mixes_with_the_others() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    draws = np.array([0.999, 0.999, 0.999])
    tokens, logprobs = sample(logits, temperatures(0.0, 100.0, 0.0), draws)
    assert tokens.tolist() == [1, 2, 0]
    plain = torch.log_softmax(logits, -1)
    assert logprobs[0] == pytest.approx(plain[0, 1].item(), abs=1e-6)
    assert logprobs[2] == pytest.approx(plain[2, 0].item(), abs=1e-6)
    hot = torch.log_softmax(logits / 100, -1)
    assert logprobs[1] == pytest.approx(hot[1, 2].item(), abs=1e-6)
    only_greedy, _ = sample(logits, temperatures(0, 0, 0), draws)
    assert only_greedy.tolist() == [1, 1, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_no_distribution_has_a_nan_logprob(bad: float, temperature: float) -> None:
    logits = torch.zeros(2, 4)
    logits[1, 2] = bad
    _, logprobs = sample(logits, temperatures(temperature, temperature), np.array([0.3, 0.3]))
    assert np.isfinite(logprobs[0])
    assert np.isnan(logprobs[1])


def test_low_precision_logits_are_scored_in_float32() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    tokens, logprobs = sample(logits, temperatures(0.7), np.array([0.4]))
    expected = torch.log_softmax(logits.float() / 0.7, -1)[0, tokens[0]]
    assert logprobs[0] == pytest.approx(expected.item(), abs=1e-6)
