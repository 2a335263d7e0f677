"""One sequence to complete: what was asked, and what it has so far.

Consumes a prompt and tokens, produces a completion; pure. While a sequence is in a row of the batch
its tokens lie there; here is what a prefill needs to give it a row again, and the versions that
made each part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ratchet.backends.rollout._checks import check_request
from ratchet.backends.rollout._sampling import stream_of
from ratchet.backends.rollout.base import Completion, SamplingParams
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
        """Make a request that the model can take; arguments and errors are `check_request`'s."""
        check_request(prompt_ids, params, vocabulary=vocabulary, context=context)
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
