"""What every engine refuses before it generates. Pure; waits for nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ratchet.errors import GenerationFailed, PromptTooLong

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ratchet.backends.rollout.base import SamplingParams


def check_request(
    prompt_ids: Sequence[int], params: SamplingParams, *, vocabulary: int, context: int | None
) -> None:
    """Check that the model can take a request.

    Args:
        prompt_ids: at least one.
        params: how to sample.
        vocabulary: size of the model's embedding.
        context: tokens that the model can see, None for any number.

    Raises:
        PromptTooLong: if prompt and max_tokens do not fit into the context.
        GenerationFailed: if the prompt is empty, an id is outside the vocabulary, or a parameter
            makes no sense.
    """
    if len(prompt_ids) == 0:
        msg = "the prompt is empty"
        raise GenerationFailed(msg)
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocabulary:
        outside = next(token for token in prompt_ids if not 0 <= token < vocabulary)
        msg = f"token id {outside} is outside the vocabulary of {vocabulary}"
        raise GenerationFailed(msg)
    if params.max_tokens < 1 or not 0 <= params.temperature < math.inf:
        msg = f"{params}: max_tokens must be positive, temperature finite and not negative"
        raise GenerationFailed(msg)
    if context is not None and len(prompt_ids) + params.max_tokens > context:
        msg = (
            f"{len(prompt_ids)} prompt tokens and max_tokens = {params.max_tokens} do not fit"
            f" into the context of {context}"
        )
        raise PromptTooLong(msg)
