"""Sampling a batch of rows, each by its own seed: the k-th token of a request depends on (seed, k,
logits) and on nothing else in the batch.

Consumes logits and seeds, produces tokens and their log probabilities; pure. The uniforms are a
counter-based hash, SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), so there is no generator state
to carry. Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
_MASK: Final = 0xFFFFFFFFFFFFFFFF


def stream_of(seed: int) -> int:
    """Return the start of a request's random stream, uint64; any integer is a seed."""
    value = seed & _MASK
    value = (value ^ (value >> 30)) * _MIX_1 & _MASK
    value = (value ^ (value >> 27)) * _MIX_2 & _MASK
    return value ^ (value >> 31)


def uniforms(
    streams: npt.NDArray[np.uint64], counters: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) per row.

    Args:
        streams: uint64 [R], of `stream_of`.
        counters: int64 [R], tokens that the row has sampled before.
    """
    bits = _mix(streams + (counters.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(
    logits: torch.Tensor, temperatures: npt.NDArray[np.float32], draws: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Sample one token per row by inversion of the cumulative distribution.

    Args:
        logits: [R, V], any float dtype.
        temperatures: float32 [R]; 0 is greedy.
        draws: float64 [R] in [0, 1).

    Returns:
        tokens int64 [R], and their log softmax(logits / temperature) (for greedy rows of
        softmax(logits)) in float32 [R]; NaN where the logits of a row are not a distribution.
    """
    greedy = temperatures == 0
    scaled = logits.float()
    if not np.all(greedy | (temperatures == 1)):
        divisors = np.where(greedy, np.float32(1), temperatures)
        scaled = scaled / torch.from_numpy(divisors).to(logits.device)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    if greedy.all():
        tokens = logprobs.argmax(-1, keepdim=True)
    else:
        tokens = _invert(logprobs, torch.from_numpy(draws).to(logits.device)[:, None])
        if greedy.any():
            rows = torch.from_numpy(greedy).to(logits.device)[:, None]
            tokens = torch.where(rows, logprobs.argmax(-1, keepdim=True), tokens)
    chosen = logprobs.gather(-1, tokens)
    return tokens[:, 0].cpu().numpy(), chosen[:, 0].cpu().numpy()


def _invert(logprobs: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    # float64, because 150,000 float32 steps would round the tail of the distribution away
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    # a draw is at most 1 - 2**-53, so the product is below the total even when it is rounded, and
    # the token found is never one of probability zero
    found = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
    return found.clamp_(max=logprobs.shape[-1] - 1)  # only a NaN row can be beyond


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))
