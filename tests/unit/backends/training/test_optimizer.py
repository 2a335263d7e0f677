import math
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from ratchet.backends.training.optimizer import Optimizer
from ratchet.errors import RunFailed


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor([values], dtype=dtype))


def gradient_norm(optimizer: Optimizer) -> float:
    optimizer.take_gradients()
    return optimizer.gradient_norm()


def take(optimizer: Optimizer, weight: nn.Parameter, gradient: list[float]) -> bool:
    weight.grad = torch.tensor([gradient], dtype=weight.dtype)
    return optimizer.step(gradient_norm(optimizer))


def test_the_rate_warms_up_linearly_and_then_stays() -> None:
    weight = parameter(0.0)
    optimizer = Optimizer([weight], lr=1.0, warmup_steps=4)
    rates = []
    for _ in range(6):
        rates.append(optimizer.next_lr)
        assert take(optimizer, weight, [1.0])
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    # with a constant gradient Adam moves by the rate each step
    assert weight.item() == pytest.approx(-sum(rates), rel=1e-5)


def test_no_warm_up() -> None:
    assert Optimizer([parameter(0.0)], lr=0.5, warmup_steps=0).next_lr == 0.5


def test_a_refused_step_does_not_count() -> None:
    weight = parameter(0.0)
    optimizer = Optimizer([weight], lr=1.0, warmup_steps=4)
    assert not take(optimizer, weight, [math.nan])
    assert optimizer.next_lr == 0.25


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_a_bad_gradient_changes_nothing_at_all(bad: float) -> None:
    def train(*gradients: list[float]) -> tuple[list[bool], list[float]]:
        weight = parameter(1.0, 2.0)
        optimizer = Optimizer([weight], lr=0.1, warmup_steps=0, weight_decay=0.1)
        return [take(optimizer, weight, g) for g in gradients], weight.tolist()[0]

    with_bad, weights = train([1.0, -1.0], [1.0, bad], [0.5, 0.1])
    without, expected = train([1.0, -1.0], [0.5, 0.1])
    assert with_bad == [True, False, True]
    assert without == [True, True]
    assert weights == expected  # moments included


def test_a_rate_that_could_overflow_is_refused() -> None:
    weight = parameter(1.0, -2.0)
    optimizer = Optimizer([weight], lr=3e38, warmup_steps=0)
    assert not take(optimizer, weight, [1.0, 1.0])
    assert weight.tolist() == [[1.0, -2.0]]
    assert weight.grad is None


@pytest.mark.parametrize("value", [3e38, math.nan, math.inf])
def test_weights_near_or_past_the_end_are_not_trained(value: float) -> None:
    weight = parameter(value, 1.0)
    optimizer = Optimizer([weight], lr=1e31, warmup_steps=0)
    assert not take(optimizer, weight, [1.0, 1.0])
    assert weight[0, 1].item() == 1.0


def test_weights_ruined_by_the_device_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = parameter(1.0)
    optimizer = Optimizer([weight], lr=0.1, warmup_steps=0)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda _: weight.data.fill_(math.nan))
    with pytest.raises(RunFailed, match="not finite"):
        take(optimizer, weight, [1.0])


def test_gradients_are_clipped_by_their_common_norm() -> None:
    def train(scale: float) -> list[float]:
        weights = [parameter(1.0), parameter(2.0)]
        optimizer = Optimizer(weights, lr=0.1, warmup_steps=0, max_grad_norm=1.0)
        for step in range(3):
            for weight, gradient in zip(weights, (3.0, 4.0 + step), strict=True):
                weight.grad = torch.tensor([[gradient * scale]])
            norm = gradient_norm(optimizer)
            assert norm == pytest.approx(math.hypot(3.0, 4.0 + step) * scale, rel=1e-6)
            assert optimizer.step(norm)
        return [weight.item() for weight in weights]

    # once clipped, the size of a gradient no longer matters
    assert train(1.0) == pytest.approx(train(1000.0), rel=1e-6)


def test_norms_and_biases_do_not_decay() -> None:
    matrix = nn.Parameter(torch.ones(1, 1))
    bias = nn.Parameter(torch.ones(1))
    optimizer = Optimizer([matrix, bias], lr=0.1, warmup_steps=0, weight_decay=0.5)
    matrix.grad, bias.grad = torch.zeros(1, 1), torch.zeros(1)
    assert optimizer.step(gradient_norm(optimizer))
    assert matrix.item() == pytest.approx(0.95)
    assert bias.item() == 1.0


def test_small_updates_of_bfloat16_weights_add_up() -> None:
    weight = parameter(1.0, dtype=torch.bfloat16)
    optimizer = Optimizer([weight], lr=1e-4, warmup_steps=0)
    for _ in range(100):
        assert take(optimizer, weight, [1.0])
    assert weight.dtype == torch.bfloat16
    # one update is far below the spacing of bfloat16 at 1, a hundred are not
    assert weight.item() == pytest.approx(0.99, abs=2**-8)


def test_frozen_parameters_are_left_alone() -> None:
    weight, frozen = parameter(1.0), parameter(1.0)
    frozen.requires_grad_(False)
    optimizer = Optimizer([weight, frozen], lr=0.1, warmup_steps=0, weight_decay=0.5)
    assert take(optimizer, weight, [1.0])
    assert frozen.item() == 1.0


def test_a_restored_optimizer_goes_on_bit_for_bit() -> None:
    """Masters, moments and the schedule come back; a parameter without a step has none."""

    def make() -> tuple[Optimizer, list[nn.Parameter]]:
        weights = [parameter(1.0, dtype=torch.bfloat16), parameter(2.0)]
        return Optimizer(weights, lr=1e-3, warmup_steps=4), weights

    first, weights = make()
    take(first, weights[0], [0.5])
    take(first, weights[0], [-0.25])
    saved = {name: tensor.clone() for name, tensor in first.state().items()}
    assert saved["steps"].tolist() == [2.0, 0.0, 2.0]
    copied = [weight.detach().clone() for weight in weights]

    second, others = make()
    with torch.no_grad():
        for other, copy in zip(others, copied, strict=True):
            other.copy_(copy)

    def read(tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])

    second.restore(read)
    assert second.next_lr == first.next_lr
    for value in (0.125, -1.0):
        take(first, weights[0], [value])
        take(second, others[0], [value])
    state, other_state = first.state(), second.state()
    assert state.keys() == other_state.keys()
    assert all(torch.equal(state[name], other_state[name]) for name in state)
    assert torch.equal(weights[0], others[0])


def test_small_gradients_are_not_lost_in_a_sum_of_many() -> None:
    weight = parameter(0.0, dtype=torch.bfloat16)
    optimizer = Optimizer([weight], lr=1.0, warmup_steps=0, max_grad_norm=1e9)
    for gradient in [1.0, *[2.0**-10] * 1024]:  # each of them less than half a digit of the first
        weight.grad = torch.tensor([[gradient]], dtype=torch.bfloat16)
        optimizer.take_gradients()
    assert optimizer.gradient_norm() == 2.0
