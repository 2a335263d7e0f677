import math

import pytest
import torch
from torch import Tensor

from ratchet.algorithms.losses import GrpoLoss, LossInputs, LossOutput, sft_loss
from ratchet.config import AlgorithmConfig

INF = float("inf")


def grpo(
    trainer: list[float],
    behavior: list[float],
    advantages: list[float],
    *,
    mask: list[int] | None = None,
    entropy: list[float] | None = None,
    **config: float,
) -> tuple[LossOutput, Tensor]:
    """Return the output and the gradient with respect to the trainer's logprobs."""
    logprobs = torch.tensor([trainer], requires_grad=True)
    output = GrpoLoss(AlgorithmConfig(**config))(
        LossInputs(
            logprobs,
            torch.tensor([behavior]),
            torch.tensor([advantages]),
            torch.tensor([entropy or [0.5] * len(trainer)]),
            torch.tensor([mask or [1] * len(trainer)]).bool(),
        )
    )
    output.total.backward()
    assert logprobs.grad is not None
    return output, logprobs.grad[0]


def ratio_case(ratio: float, advantage: float, **config: float) -> tuple[float, float]:
    """Return loss and gradient of one token with this importance ratio."""
    output, gradient = grpo([math.log(ratio) - 1.0], [-1.0], [advantage], **config)
    return output.total.item(), gradient.item()


def test_on_policy_the_gradient_is_the_plain_policy_gradient() -> None:
    output, gradient = grpo([-1.0, -2.0], [-1.0, -2.0], [1.5, -0.5])
    assert gradient.tolist() == [-1.5, 0.5]
    assert output.total.item() == pytest.approx(-1.0)
    assert output.sums["importance_ratio_mean"].item() == 2.0
    assert output.sums["behavior_kl"].item() == 0.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside
        (0.9, -2.0, 1.8, 1.8),
        (0.5, 2.0, -1.0, -1.0),  # outside, but moving back
        (1.5, -2.0, 3.0, 3.0),
        (1.5, 2.0, -2.56, 0.0),  # outside, and moving on: stopped at 1.28
        (0.5, -2.0, 1.6, 0.0),  # stopped at 0.8
        (50.0, -2.0, 4.0, 4.0),  # moving back, weight truncated at 2
        (50.0, 2.0, -2.56, 0.0),
    ],
)
def test_clip_higher_and_truncation_by_hand(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    assert ratio_case(ratio, advantage) == pytest.approx((loss, gradient), rel=1e-5, abs=1e-9)


def test_below_the_cap_it_is_ppo() -> None:
    generator = torch.Generator().manual_seed(0)
    behavior = -torch.rand(1, 64, generator=generator)
    advantages = torch.randn(1, 64, generator=generator)
    logprobs = (behavior + 0.5 * torch.randn(1, 64, generator=generator)).requires_grad_()
    mask = torch.ones(1, 64).bool()
    inputs = LossInputs(logprobs, behavior, advantages, torch.zeros(1, 64), mask)
    total = GrpoLoss(AlgorithmConfig(importance_cap=1e6))(inputs).total
    ratio = (logprobs - behavior).exp()
    ppo = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages).sum()
    assert total.item() == pytest.approx(ppo.item(), rel=1e-5)
    (mine,) = torch.autograd.grad(total, logprobs)
    (theirs,) = torch.autograd.grad(ppo, logprobs)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_shares_are_counted() -> None:
    trainer = [math.log(r) for r in (1.0, 0.5, 1.5, 50.0, 50.0)]
    output, _ = grpo(trainer, [0.0] * 5, [1.0, -1.0, 1.0, -1.0, 1.0])
    assert output.sums["clip_low_share"].item() == 1
    assert output.sums["clip_high_share"].item() == 2
    assert output.sums["truncated_share"].item() == 1
    assert output.maxima["importance_ratio_max"].item() == pytest.approx(50.0)


def test_behavior_kl_is_k3() -> None:
    output, _ = grpo([-1.0], [-1.7], [1.0])
    assert output.sums["behavior_kl"].item() == pytest.approx(math.exp(0.7) - 1 - 0.7, rel=1e-5)


@pytest.mark.parametrize("bad", [INF, -INF, float("nan")])
@pytest.mark.parametrize("where", ["trainer", "behavior", "advantages", "entropy"])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_a_masked_token_poisons_nothing(bad: float, where: str, entropy_coef: float) -> None:
    values = {name: [-1.0, -1.0] for name in ("trainer", "behavior", "advantages", "entropy")}
    values[where][1] = bad
    output, gradient = grpo(**values, mask=[1, 0], entropy_coef=entropy_coef)
    clean, clean_gradient = grpo([-1.0], [-1.0], [-1.0], entropy=[-1.0], entropy_coef=entropy_coef)
    assert output.total.item() == clean.total.item()
    assert gradient.tolist() == [clean_gradient.item(), 0.0]
    assert all(value.isfinite() for value in output.sums.values())
    assert output.maxima["importance_ratio_max"].item() == 1.0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(
    ("trainer", "behavior"), [(0.0, -INF), (0.0, -1e30), (-1e30, 0.0), (-5000.0, -1.0)]
)
def test_extreme_ratios_stay_finite(trainer: float, behavior: float, advantage: float) -> None:
    output, gradient = grpo([trainer], [behavior], [advantage])
    assert output.total.isfinite()
    assert gradient.isfinite().all()
    assert abs(gradient.item()) <= 2.0
    assert all(value.isfinite() for value in (*output.sums.values(), *output.maxima.values()))


@pytest.mark.parametrize("where", ["trainer", "behavior", "advantages"])
def test_a_nan_of_a_trained_token_shows(where: str) -> None:
    values = {name: [-1.0, -1.0] for name in ("trainer", "behavior", "advantages")}
    values[where][1] = float("nan")
    output, _ = grpo(**values)
    assert output.total.isnan()


def test_the_entropy_bonus_raises_entropy() -> None:
    logits = torch.zeros(1, 1, 3)
    logits[0, 0, 0] = 1.0
    logits.requires_grad_()
    log_softmax = logits.log_softmax(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    zeros = torch.zeros(1, 1)
    inputs = LossInputs(log_softmax[..., 0], zeros, zeros, entropy, torch.ones(1, 1).bool())
    GrpoLoss(AlgorithmConfig(entropy_coef=0.1))(inputs).total.backward()
    assert logits.grad is not None
    assert logits.grad[0, 0, 0] > 0  # descent lowers the likeliest token
    assert logits.grad[0, 0, 1] < 0


def test_a_good_token_becomes_likelier_and_a_bad_one_less() -> None:
    _, gradient = grpo([-1.0, -1.0], [-1.2, -1.2], [1.0, -1.0])
    assert gradient[0] < 0 < gradient[1]


def test_sft_is_cross_entropy_over_the_mask() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -INF]], requires_grad=True)
    zeros = torch.zeros(1, 3)
    mask = torch.tensor([[True, True, False]])
    output = sft_loss(LossInputs(logprobs, zeros, zeros, zeros, mask))
    output.total.backward()
    assert output.total.item() == 3.0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-1.0, -1.0, 0.0]]
