"""Whether a server's log probabilities are those of what it sampled from: softmax(logits / T).

Consumes a server that generates, produces nothing, or a `ConfigError`; waits for one token of two
requests. The probe after a load cannot show it: scores of given ids have no temperature.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ratchet.backends.rollout.sglang.client import CallFailed
from ratchet.errors import ConfigError, EngineLost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ratchet.backends.rollout.sglang.client import SGLangClient

_IDS: Final = [0, 1, 2, 3]
"""Few, as a server refuses those that its model does not have."""
_PROMPT: Final = [1, 2, 3]
"""Not 0 alone: the embedding of a padding id is zero, and all that follows it equally likely."""
_TEMPERATURES: Final = (1.0, 2.0)
_LARGEST_RATIO: Final = 0.75
"""Of the differences between two log probabilities: a half at twice the temperature, one if it is
left out. Rounding in half precision is far from either.
"""


class _Meta(msgspec.Struct):
    output_token_ids_logprobs: tuple[list[tuple[float | None, int, Any]]]
    """of the one token that is generated"""


class _Answer(msgspec.Struct):
    meta_info: _Meta


_decode: Final = msgspec.json.Decoder(list[_Answer]).decode


async def check_temperature(client: SGLangClient, timeout_s: float) -> None:
    """Let a server say the log probabilities of some ids as a next token, cold and warm.

    A paused server is left alone: an engine before us has paused it, and looked.

    Raises:
        ConfigError: if they are the same.
        EngineLost: if it does not answer, or something else.
    """
    try:
        if not await client.ready(timeout_s=timeout_s):
            return
        cold, warm = await next_logprobs(client, timeout_s)
    except CallFailed as error:
        raise EngineLost(str(error)) from error
    low, high = cold.index(min(cold)), cold.index(max(cold))
    at_one, at_two = cold[high] - cold[low], warm[high] - warm[low]
    if not math.isfinite(at_one + at_two):
        return  # torn weights that a run before this one has left; the probe judges our own
    if at_two > _LARGEST_RATIO * at_one:
        msg = (
            f"the SGLang server at {client.url} returns log probabilities without the temperature"
            f" (two ids differ by {at_one:.4g} at 1 and by {at_two:.4g} at 2), so they are not of"
            " what it samples from; start it without SGLANG_RETURN_ORIGINAL_LOGPROB"
        )
        raise ConfigError(msg)


async def next_logprobs(client: SGLangClient, timeout_s: float) -> list[Sequence[float]]:
    """Return the log probabilities of some ids as a next token, at T = 1 and at T = 2; NaN where
    there is none.

    Raises:
        CallFailed: if the call fails, or its answer is of another shape.
        EngineLost: if the answer is about other ids.
    """
    body = {
        "input_ids": [_PROMPT] * len(_TEMPERATURES),
        "sampling_params": [
            {"temperature": each, "top_p": 1.0, "top_k": -1, "max_new_tokens": 1}
            for each in _TEMPERATURES
        ],
        "return_logprob": True,
        "token_ids_logprob": [_IDS] * len(_TEMPERATURES),
    }
    answers = await client.generate(body, timeout_s=timeout_s, decode=_decode)
    return [_logprobs(answer) for answer in answers]


def _logprobs(answer: _Answer) -> Sequence[float]:
    (first,) = answer.meta_info.output_token_ids_logprobs
    values = {token: math.nan if value is None else value for value, token, _ in first}
    if values.keys() != set(_IDS):
        msg = f"the SGLang server scored {sorted(values)} where it was asked for {_IDS}"
        raise EngineLost(msg)
    return [values[token] for token in _IDS]
