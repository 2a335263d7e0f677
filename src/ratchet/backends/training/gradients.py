"""The gradients of a batch: forward and backward, micro-batch by micro-batch, over all ranks.

Consumes rows and a loss, leaves gradients on the model's parameters and produces metrics; waits for
nothing but the other ranks. Shapes: B rows, K columns, V vocabulary.

The loss of a batch is the mean over its trained tokens. Every rank is given the whole batch, so it
knows the number of those tokens without asking, and trains its share of each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ratchet.algorithms.losses import Loss, LossInputs, LossOutput
from ratchet.algorithms.packing import MicroBatch, Row, pad, plan_micro_batches, trained_tokens
from ratchet.backends.training.sharding import Ranks, max_over_ranks, sum_over_ranks
from ratchet.types import Packed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class GradientPass:
    """Computes gradients of one model."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        device: torch.device,
        ranks: Ranks,
        max_tokens: int,
        temperature: float,
        entropy_gradient: bool,
    ) -> None:
        """Prepare.

        Args:
            model: in evaluation mode, so that it computes what the engines compute.
            device: of the model.
            ranks: of the processes that share the model.
            max_tokens: padded tokens of one micro-batch on one rank.
            temperature: that the engines sample with: both sides mean the same distribution.
            entropy_gradient: whether the loss differentiates the entropy.
        """
        self._model = model
        self._device = device
        self._ranks = ranks
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._entropy_gradient = entropy_gradient

    def run(
        self, rows: Sequence[Row], loss: Loss, take_gradients: Callable[[], None]
    ) -> dict[str, float]:
        """Compute the gradient of the mean loss over the trained tokens of `rows`; return metrics.

        Args:
            rows: of the whole batch.
            loss: of a micro-batch.
            take_gradients: called when the parameters have the gradients of a micro-batch.
        """
        num_tokens = trained_tokens(rows)
        # FSDP averages gradients over ranks, where the sum is wanted
        scale = self._ranks.size / max(1, num_tokens)
        outputs = []
        for shares in plan_micro_batches(rows, self._max_tokens, self._ranks.size):
            share = shares[self._ranks.rank] or [_untrained(shares[0][0])]
            output = loss(self._inputs(pad(share).to(self._device)))
            torch.autograd.backward(output.total * scale)
            take_gradients()
            outputs.append(output)
        return {"trained_tokens": num_tokens, **self._reduce(outputs, max(1, num_tokens))}

    def _inputs(self, batch: MicroBatch) -> LossInputs:
        logits = self._model(
            input_ids=batch.input_ids, use_cache=False, logits_to_keep=batch.targets.shape[1]
        ).logits.float()
        if self._temperature != 1.0:
            logits = logits / self._temperature
        log_norm = logits.logsumexp(-1)
        chosen = logits.gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
        with torch.set_grad_enabled(self._entropy_gradient):
            entropy = token_entropy(logits, log_norm)
        return LossInputs(
            trainer_logprobs=chosen - log_norm,
            behavior_logprobs=batch.behavior_logprobs,
            advantages=batch.advantages,
            entropy=entropy,
            loss_mask=batch.loss_mask,
        )

    def _reduce(self, outputs: Sequence[LossOutput], num_tokens: int) -> dict[str, float]:
        sums = self._stack([{"loss": output.total.detach(), **output.sums} for output in outputs])
        maxima = self._stack([output.maxima for output in outputs])
        means = sum_over_ranks(sums.sum(0), self._ranks) / num_tokens
        largest = max_over_ranks(maxima.amax(0), self._ranks)
        names = ("loss", *outputs[0].sums, *outputs[0].maxima)
        return dict(zip(names, [*means.tolist(), *largest.tolist()], strict=True))

    def _stack(self, parts: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return a row of metrics for each micro-batch."""
        empty = torch.zeros(0, dtype=torch.float64, device=self._device)
        rows = [[value.to(torch.float64) for value in part.values()] for part in parts]
        return torch.stack([torch.stack(row) if row else empty for row in rows])


def token_entropy(logits: Tensor, log_norm: Tensor) -> Tensor:
    """Return the entropy of softmax(logits) [B, K] from logits [B, K, V] and their logsumexp."""
    probabilities = (logits - log_norm.unsqueeze(-1)).exp()
    # a token shut out by an infinite logit adds nothing, and 0 x inf would be NaN
    finite = logits.clamp(min=torch.finfo(logits.dtype).min)
    return log_norm - (probabilities * finite).sum(-1)


def _untrained(row: Row) -> Row:
    """Return a row for a rank that has none left: it takes part, and adds nothing."""
    return row._replace(loss_mask=Packed("uint8", bytes(len(row.loss_mask))))
