"""The protocol of a rollout engine: ids in, ids out, with the logprobs and the version of every
token.

A backend consumes requests and weights, produces completions; it waits for weights before the first
token (an engine without a live version serves nothing) and while it is paused. Blocking work runs
on threads of its own, never on the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from ratchet.transport.weights.base import WeightSink
from ratchet.types import FinishReason, Packed, VersionSpan


class SamplingParams(NamedTuple):
    """How to sample. The distribution is softmax(logits / temperature) over the whole vocabulary;
    temperature 0 is greedy.
    """

    max_tokens: int
    temperature: float
    seed: int


class Completion(NamedTuple):
    """What an engine sampled. C tokens, the end-of-sequence token included where one was sampled; C
    is at least 1.
    """

    token_ids: Packed
    """int32 [C]"""
    logprobs: Packed
    """float32 [C]; log softmax(logits / temperature) of each token; at temperature 0 of
    softmax(logits)
    """
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason


class EngineStats(NamedTuple):
    """Running totals since start."""

    busy_s: float
    paused_s: float
    generated_tokens: int
    running: int
    """sequences in the batch now"""
    waiting: int
    """requests not yet in the batch"""


class RolloutEngine(WeightSink, Protocol):
    """An engine that one RolloutActor owns."""

    async def start(self) -> None:
        """Load whatever is needed; the engine has no version yet."""
        ...

    async def watch(self) -> None:
        """Wait until the engine is lost: it cannot serve any more, and nobody has closed it. It has
        no version then and fails what is in flight; it does not come back, another one does. Called
        after `start`.

        Raises:
            EngineLost: then, with the reason.
        """
        ...

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Generate one completion; many calls are in flight at once. Cancelling the call takes it
        out of the batch.

        Raises:
            PromptTooLong: if prompt and max_tokens do not fit into the context.
            GenerationFailed: if the engine could not go on, or an id is outside the vocabulary.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Turn a prompt into ids, by the tokenizer (and chat template, where configured)."""
        ...

    def encode_reply(self, text: str) -> list[int]:
        """Turn what an environment answers into the ids behind a turn that ended by itself; with a
        chat template also what closes that turn and opens the next.
        """
        ...

    @property
    def context(self) -> int | None:
        """Tokens that prompt and completion may have together; None for any number."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turn completion ids into text, for scoring only.

        Of special tokens only an end of sequence at the end is left out: whatever else the policy
        samples, the reward must see.
        """
        ...

    def stats(self) -> EngineStats:
        """Return the running totals."""
        ...

    async def close(self) -> None:
        """Fail what is in flight with `GenerationFailed` and free everything."""
        ...


@runtime_checkable
class ServedEngine(Protocol):
    """What an engine with processes of its own has beside the rest."""

    def log_to(self, path: Path) -> None:
        """Let the output of its processes go to a file; called before `start`."""
        ...
