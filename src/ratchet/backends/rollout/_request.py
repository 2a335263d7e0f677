"""One sequence to complete: what was asked, and what it has so far.

Consumes a prompt and tokens, produces a completion; pure. While a sequence is in a row of the batch
its tokens lie there; here is what a prefill needs to give it a row again, and the versions that
made each part.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ratchet.backends.rollout._sampling import stream_of
from ratchet.backends.rollout.base import Completion, SamplingParams
from ratchet.errors import GenerationFailed, PromptTooLong
from ratchet.types import Packed, PolicyVersion, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Sequence


class Request:
    """One sequence to complete, and what it has so far whenever it is not in a row."""

    __slots__ = ("logprobs", "marks", "params", "prompt", "stream", "tokens")

    def __init__(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self.prompt: npt.NDArray[np.int64] = np.array(prompt_ids, dtype=np.int64)
        self.params = params
        self.stream = stream_of(params.seed)
        self.tokens: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self.logprobs: npt.NDArray[np.float32] = np.empty(0, np.float32)
        self.marks: list[tuple[int, PolicyVersion]] = []

    @classmethod
    def checked(
        cls,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        vocabulary: int,
        context: int | None,
    ) -> Request:
        """Make a request that the model can take.

        Args:
            prompt_ids: at least one.
            params: how to sample.
            vocabulary: size of the model's embedding.
            context: tokens that the model can see, None for any number.

        Raises:
            PromptTooLong: if prompt and max_tokens do not fit into the context.
            GenerationFailed: if the prompt is empty, an id is outside the vocabulary, or a
                parameter makes no sense.
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
        return cls(prompt_ids, params)

    @property
    def context(self) -> npt.NDArray[np.int64]:
        """What a prefill computes: the prompt, and the tokens made before a retraction."""
        return np.concatenate([self.prompt, self.tokens]) if len(self.tokens) else self.prompt

    def mark(self, start: int, version: PolicyVersion) -> None:
        """From token `start` on, `version` generates."""
        if self.marks and self.marks[-1][0] == start:
            self.marks.pop()
        if not self.marks or self.marks[-1][1] != version:
            self.marks.append((start, version))

    def completion(
        self, tokens: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32], stopped: bool
    ) -> Completion:
        """Say what became of it; both arrays are little-endian."""
        ends = [start for start, _ in self.marks[1:]] + [len(tokens)]
        return Completion(
            token_ids=Packed("int32", tokens.tobytes()),
            logprobs=Packed("float32", logprobs.tobytes()),
            spans=tuple(
                VersionSpan(version, start, end)
                for (start, version), end in zip(self.marks, ends, strict=True)
            ),
            finish_reason="stop" if stopped else "length",
        )
