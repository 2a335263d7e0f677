"""What goes to /generate, and which answers become completions."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ratchet.backends.rollout.base import Completion, SamplingParams
from ratchet.backends.rollout.sglang.answers import (
    Limits,
    NoVersion,
    completion_of,
    decode_answer,
    kept_tokens,
    request_body,
)
from ratchet.errors import GenerationFailed, PromptTooLong
from ratchet.types import VersionSpan

PARAMS = SamplingParams(max_tokens=4, temperature=0.7, seed=3)
LIMITS = Limits.of(vocabulary=24, context=4096)


def answer(tokens: list[int], **changes: Any) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": "r",
        "finish_reason": {"type": "length", "length": len(tokens)},
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "weight_versions": [{"version": "7", "start": 0, "end": len(tokens)}],
    }
    return {"text": "", "output_ids": tokens, "meta_info": meta | changes}


def completion(tokens: list[int], **changes: Any) -> Completion:
    return completion_of(decode_answer(msgspec.json.encode(answer(tokens, **changes))), PARAMS)


def span(version: str, start: int, end: int) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


def test_the_distribution_is_said_in_full() -> None:
    body = request_body("r", (5, 6), PARAMS, end_ids=(2, 1), salt="s", fields={"lora_path": "a"})
    assert (body["rid"], body["input_ids"], body["extra_key"]) == ("r", [5, 6], "s")
    assert body["lora_path"] == "a"
    assert body["return_logprob"] is True
    sampling = body["sampling_params"]
    assert (sampling["max_new_tokens"], sampling["temperature"]) == (4, 0.7)
    whole = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    whole |= {"frequency_penalty": 0.0, "presence_penalty": 0.0, "min_new_tokens": 0}
    assert whole.items() <= sampling.items()
    assert sampling["stop_token_ids"] == [1, 2]
    assert sampling["ignore_eos"] is False


def test_without_an_end_nothing_ends_it() -> None:
    body = request_body("r", [5], PARAMS, end_ids=(), salt="s", fields={})
    assert body["sampling_params"]["ignore_eos"] is True


@pytest.mark.parametrize("max_tokens", [1, 4, 5, 6, 100])
def test_what_is_kept_is_what_the_limits_leave_out(max_tokens: int) -> None:
    longest = 4096 - max_tokens - kept_tokens(max_tokens)
    params = PARAMS._replace(max_tokens=max_tokens)
    LIMITS.check([5] * longest, params)
    with pytest.raises(PromptTooLong):
        LIMITS.check([5] * (longest + 1), params)


@pytest.mark.parametrize("seed", [-1, 0, 2**63, 2**80 + 5])
def test_any_seed_fits(seed: int) -> None:
    params = PARAMS._replace(seed=seed)
    body = request_body("r", [5], params, end_ids=(), salt="s", fields={})
    assert 0 <= body["sampling_params"]["sampling_seed"] < 2**63


def test_an_answer_becomes_a_completion() -> None:
    made = completion([5, 6, 7, 8], weight_versions=[span("7", 0, 1), span("9", 1, 4)])
    assert made.token_ids.numpy().tolist() == [5, 6, 7, 8]
    assert made.logprobs.numpy().tolist() == [-0.5] * 4
    assert made.spans == (VersionSpan(7, 0, 1), VersionSpan(9, 1, 4))
    assert made.finish_reason == "length"


def test_an_end_of_sequence_is_a_stop() -> None:
    assert completion([5, 1], finish_reason={"type": "stop", "matched": 1}).finish_reason == "stop"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"finish_reason": {"type": "abort", "message": "no memory"}}, "'abort'.*no memory"),
        ({"finish_reason": {"type": "stop", "matched": "NaN happened"}}, "NaN happened"),
        ({"finish_reason": {"type": "stop", "matched": 5}}, "'stop'"),
        ({"finish_reason": {"type": "something new"}}, "something new"),
        ({"output_token_logprobs": [[None, 5, None]] * 4}, "other tokens"),
        ({"output_token_logprobs": [[-0.5, t, None] for t in (5, 6, 7)]}, "3 other tokens"),
        ({"output_token_logprobs": [[None, t, None] for t in (5, 6, 7, 8)]}, "not finite"),
        ({"weight_versions": []}, "versions of other tokens"),
        ({"weight_versions": [span("7", 0, 3)]}, "versions of other tokens"),
        ({"weight_versions": [span("7", 1, 4)]}, "versions of other tokens"),
        ({"weight_versions": [span("7", 0, 1), span("8", 2, 4)]}, "versions of other tokens"),
        ({"weight_versions": [span("7", 0, 0), span("8", 0, 4)]}, "without tokens"),
    ],
)  # fmt: skip
def test_anything_else_is_no_sample(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(GenerationFailed, match=match):
        completion([5, 6, 7, 8], **changes)


def test_a_completion_that_the_server_cut_short_is_no_sample() -> None:
    with pytest.raises(GenerationFailed, match="3 of at most 4"):
        completion([5, 6, 7])


@pytest.mark.parametrize("name", ["default", "-1", "²", "1.0", ""])
def test_weights_that_are_no_version_are_told_apart(name: str) -> None:
    with pytest.raises(NoVersion):
        completion([5, 6, 7, 8], weight_versions=[span(name, 0, 4)])


def test_limits_are_those_that_a_server_keeps_to() -> None:
    LIMITS.check([5] * 4089, SamplingParams(5, 1.0, 0))
    for length, max_tokens in ((4089, 6), (4090, 1)):
        with pytest.raises(PromptTooLong):
            LIMITS.check([5] * length, SamplingParams(max_tokens, 1.0, 0))
    with pytest.raises(GenerationFailed, match="24 is outside the vocabulary"):
        LIMITS.check([5, 24], PARAMS)
    with pytest.raises(GenerationFailed, match="too low"):
        LIMITS.check([5], PARAMS._replace(temperature=1e-7))
    LIMITS.check([5], PARAMS._replace(temperature=0.0))
