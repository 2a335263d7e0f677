"""What goes to /generate, and what comes back: ids in, ids out.

Pure; waits for nothing. Everything that shapes the distribution is said in each request, so that no
default of a server or of a model's directory does: softmax(logits / temperature) over the whole
vocabulary. An answer becomes a completion only if it is whole: as long as it says, ended as was
asked for, every log probability a number, every token with the version that made it.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ratchet.backends.rollout._checks import check_request
from ratchet.backends.rollout.base import Completion, SamplingParams
from ratchet.errors import GenerationFailed, PromptTooLong
from ratchet.types import FinishReason, Packed, PolicyVersion, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

_COLDEST: Final = 1e-6
"""Temperatures below are greedy to SGLang, with log probabilities of another distribution."""
_LARGEST_SEED: Final = 2**63 - 1
_KEPT: Final = 2
_KEPT_FROM_PROMPT: Final = 7
"""Tokens of its context that a server keeps to itself: of a prompt and its completion together, and
of a prompt.
"""


def kept_tokens(max_tokens: int) -> int:
    """Return how much shorter than the context a prompt with its completion has to be."""
    return max(_KEPT, _KEPT_FROM_PROMPT - max_tokens)


class Limits(msgspec.Struct, frozen=True):
    """What the servers of an engine take."""

    vocabulary: int
    """size of the model's embedding; an id beyond it can end a server"""
    context: int
    """tokens of a prompt and its completion together"""
    prompt: int
    """tokens of a prompt"""

    @classmethod
    def of(cls, vocabulary: int, context: int) -> Limits:
        """Derive them.

        Args:
            vocabulary: size of the embedding.
            context: tokens of the server's context, or of its cache if that is smaller. It keeps
                some to itself, and generates less than it is asked to without a word.
        """
        return cls(vocabulary, context=context - _KEPT, prompt=context - _KEPT_FROM_PROMPT)

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Check a request before it is sent.

        Raises:
            PromptTooLong: if it is longer than the servers take.
            GenerationFailed: if an id is outside the vocabulary, or a parameter makes no sense.
        """
        check_request(prompt_ids, params, vocabulary=self.vocabulary, context=self.context)
        if len(prompt_ids) > self.prompt:
            msg = f"{len(prompt_ids)} prompt tokens are more than the servers take, {self.prompt}"
            raise PromptTooLong(msg)
        if 0 < params.temperature < _COLDEST:
            msg = f"temperature = {params.temperature} is too low: use 0, or at least {_COLDEST}"
            raise GenerationFailed(msg)


def request_body(
    rid: str,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    end_ids: Collection[int],
    salt: str,
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the body of /generate.

    Args:
        rid: name of the request, to abort it by.
        prompt_ids: checked.
        params: checked. The seed counts only on servers of `--enable-deterministic-inference`.
        end_ids: end the completion, and belong to it.
        salt: requests of another one share no part of the prefix cache.
        fields: further ones, such as the adapter.
    """
    return {
        "rid": rid,
        "input_ids": prompt_ids if isinstance(prompt_ids, list) else list(prompt_ids),
        "sampling_params": {
            "max_new_tokens": params.max_tokens,
            "temperature": params.temperature,
            "sampling_seed": params.seed & _LARGEST_SEED,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_new_tokens": 0,
            "stop_token_ids": sorted(end_ids),
            "ignore_eos": not end_ids,
            "no_stop_trim": True,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "stream": False,
        "extra_key": salt,
        **fields,
    }


class _Reason(msgspec.Struct):
    type: str
    matched: int | str | None = None
    message: str | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct):
    finish_reason: _Reason
    weight_versions: list[_Span] = []
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []


class Answer(msgspec.Struct):
    """What /generate returns, as far as it is read."""

    output_ids: list[int]
    meta_info: _Meta


decode_answer: Final = msgspec.json.Decoder(Answer).decode


def completion_of(
    answer: Answer, params: SamplingParams, version: PolicyVersion | None = None
) -> Completion:
    """Return what an answer holds, if it is whole.

    Args:
        answer: of /generate.
        params: what was asked for.
        version: that made all tokens, where the request named it; by default the server says.

    Raises:
        GenerationFailed: if it is not; the text says what is wrong.
    """
    tokens, meta = answer.output_ids, answer.meta_info
    reason = _finish_reason(meta.finish_reason, tokens, params)
    values = [logprob for logprob, _, _ in meta.output_token_logprobs]
    if [token for _, token, _ in meta.output_token_logprobs] != tokens:
        msg = f"the server returned log probabilities of {len(values)} other tokens than it made"
        raise GenerationFailed(msg)
    logprobs = [value for value in values if value is not None and math.isfinite(value)]
    if len(logprobs) < len(values):
        msg = "the server returned log probabilities that are not finite"
        raise GenerationFailed(msg)
    return Completion(
        token_ids=Packed.of(tokens, "int32"),
        logprobs=Packed.of(logprobs, "float32"),
        spans=(
            _spans(meta.weight_versions, len(tokens))
            if version is None
            else (VersionSpan(version, 0, len(tokens)),)
        ),
        finish_reason=reason,
    )


def _finish_reason(reason: _Reason, tokens: Sequence[int], params: SamplingParams) -> FinishReason:
    if reason.type == "length" and len(tokens) == params.max_tokens:
        return "length"
    # what it matches may be text ("NaN happened"): then the last token was not sampled
    if reason.type == "stop" and tokens and reason.matched == tokens[-1]:
        return "stop"
    msg = (
        f"the server ended the request with {reason.type!r} ({reason.message or reason.matched})"
        f" after {len(tokens)} of at most {params.max_tokens} tokens"
    )
    raise GenerationFailed(msg)


def _spans(spans: Sequence[_Span], length: int) -> tuple[VersionSpan, ...]:
    edges = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != edges[:-1] or edges[-1] != length or not spans:
        msg = f"the server returned versions of other tokens than it made: {spans}"
        raise GenerationFailed(msg)
    if any(left >= right for left, right in pairwise(edges)):
        msg = f"the server returned a version without tokens: {spans}"
        raise GenerationFailed(msg)
    return tuple(VersionSpan(_version(span.version), span.start, span.end) for span in spans)


def _version(text: str) -> PolicyVersion:
    if not (text.isascii() and text.isdecimal()):
        raise NoVersion(text)
    return int(text)


class NoVersion(GenerationFailed):
    """Tokens that were made by weights which this run has not sent.

    Args:
        text: what the server calls them.
    """

    def __init__(self, text: str) -> None:
        super().__init__(f"the server generated with weights {text!r}, which are none of this run")
