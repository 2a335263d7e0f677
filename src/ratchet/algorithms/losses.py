"""Token losses and their off-policy corrections.

Consumes the logprobs of the policy in training and of the one that sampled, produces a sum over
tokens to differentiate, and metrics; waits for nothing. The choice of the objective is explained in
docs/design/0010-loss.md. Shapes: B rollouts, T token positions, padded.

A loss is summed, not averaged: the backend divides by the trained tokens of the whole batch, so
that the gradient does not depend on how the batch was cut into micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ratchet.config import AlgorithmConfig

MAX_LOG_RATIO: Final = 20.0
"""Log-ratios are clamped to this size before exp, which stays far from overflow (e^20 = 4.9e8)."""


class LossInputs(NamedTuple):
    """What is known of each token. Where `loss_mask` is False the values mean nothing and may be
    infinite: select with `torch.where` before computing, as 0 x inf is NaN.
    """

    trainer_logprobs: Tensor
    """float32 [B, T], differentiable"""
    behavior_logprobs: Tensor
    """float32 [B, T]"""
    advantages: Tensor
    """float32 [B, T]"""
    entropy: Tensor
    """float32 [B, T] of the trainer's distribution; differentiable if `entropy_coef` is not 0"""
    loss_mask: Tensor
    """bool [B, T]"""


class LossOutput(NamedTuple):
    """Sums and maxima over the tokens given, so that parts of a batch can be put together."""

    total: Tensor
    """scalar to differentiate, summed over the trained tokens; its mean is reported as `loss`"""
    sums: Mapping[str, Tensor]
    """metric -> sum over the trained tokens; reported as a mean"""
    maxima: Mapping[str, Tensor]
    """metric -> largest value of a trained token; reported as it is"""


Loss: TypeAlias = Callable[[LossInputs], LossOutput]


class GrpoLoss:
    """GRPO's token objective, with the ratio taken against the policy that sampled each token.

    With r = exp(trainer - behavior), the gradient of a token is min(r, importance_cap) x advantage
    x grad log p: the truncated importance weight (arXiv:1802.01561, arXiv:2505.24034). It is 0
    where the policy has already moved out of [1 - clip_low, 1 + clip_high] in the direction of the
    advantage (PPO, arXiv:1707.06347; clip-higher and the mean over tokens, arXiv:2503.14476). On
    policy, r is 1 and this is the plain policy gradient.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self._low = 1.0 - config.clip_low
        self._high = 1.0 + config.clip_high
        self._cap = config.importance_cap
        self._entropy_coef = config.entropy_coef

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the summed loss; a NaN of a trained token makes it NaN."""
        mask, advantages = inputs.loss_mask, inputs.advantages
        zero = inputs.trainer_logprobs.new_zeros(())
        difference = inputs.trainer_logprobs.detach() - inputs.behavior_logprobs
        log_ratio = torch.where(mask, difference, zero).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        clipped_low = mask & (advantages < 0) & (ratio < self._low)
        clipped_high = mask & (advantages > 0) & (ratio > self._high)
        active = mask & ~(clipped_low | clipped_high)

        # its value is the clipped, truncated ratio; its gradient is that ratio where it is active
        logprobs = torch.where(active, inputs.trainer_logprobs, zero)
        weight = torch.where(active, ratio, ratio.clamp(self._low, self._high)).clamp(max=self._cap)
        surrogate = weight * (logprobs - logprobs.detach()).exp()
        total = -torch.where(mask, surrogate * advantages, zero).sum()
        entropy = torch.where(mask, inputs.entropy, zero).sum()
        if self._entropy_coef:
            total = total - self._entropy_coef * entropy
        return LossOutput(
            total,
            sums={
                "entropy": entropy.detach(),
                "importance_ratio_mean": torch.where(mask, ratio, zero).sum(),
                "clip_low_share": clipped_low.sum(),
                "clip_high_share": clipped_high.sum(),
                "truncated_share": (active & (ratio > self._cap)).sum(),
                "behavior_kl": (ratio - 1.0 - log_ratio).sum(),
            },
            maxima={"importance_ratio_max": torch.where(mask, ratio, zero).max()},
        )


def sft_loss(inputs: LossInputs) -> LossOutput:
    """Return the summed cross-entropy of the trained tokens."""
    zero = inputs.trainer_logprobs.new_zeros(())
    total = -torch.where(inputs.loss_mask, inputs.trainer_logprobs, zero).sum()
    return LossOutput(total, sums={}, maxima={})
