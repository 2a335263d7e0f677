"""What SGLang 0.5.23 answers, to /generate above all, without a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import xxhash
from aiohttp import web


@dataclass
class Running:
    """A request of /generate."""

    body: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    aborted: bool = False
    retractions: int = 0


def nth(body: dict[str, Any], index: int) -> dict[str, Any]:
    """Return one request of a batch: each of its lists has a part for each prompt."""
    each = {name: value[index] for name, value in body.items() if isinstance(value, list)}
    return {**body, **each}


def next_token(request: Running, version: str, vocabulary: int) -> int:
    """Return the token that the weights of a version make next."""
    seed = request.body["sampling_params"].get("sampling_seed")
    text = f"{request.body['input_ids']} {len(request.tokens)} {version} {seed}"
    return 3 + xxhash.xxh3_64_intdigest(text.encode()) % (vocabulary - 3)


def answer_of(
    rid: str,
    request: Running,
    reason: dict[str, Any],
    version: str,
    *,
    prompt_logprob: float,
    ignores_temperature: bool,
) -> dict[str, Any]:
    """Return the answer to a request that has ended.

    Args:
        rid: of the request.
        request: what it asked for, and has.
        reason: for which it ended.
        version: of the weights by now.
        prompt_logprob: of every token of a prompt that is scored.
        ignores_temperature: in the log probabilities of ids that are asked for by name.
    """
    spans: list[dict[str, Any]] = []
    for index, each in enumerate(request.versions):
        if spans and spans[-1]["version"] == each:
            spans[-1]["end"] = index + 1
        else:
            spans.append({"version": each, "start": index, "end": index + 1})
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": reason,
        "prompt_tokens": len(request.body["input_ids"]),
        "completion_tokens": len(request.tokens),
        "weight_version": version,
        "num_retractions": request.retractions,
    }
    if spans:
        meta["weight_versions"] = spans
    if request.body.get("return_logprob"):
        meta["output_token_logprobs"] = [[-0.5, token, None] for token in request.tokens]
    if request.body.get("logprob_start_len") == 0:
        first, *scored = request.body["input_ids"]
        meta["input_token_logprobs"] = [
            [None, first, None],
            *([prompt_logprob, token, None] for token in scored),
        ]
    if (named := request.body.get("token_ids_logprob")) is not None:
        sampling = request.body["sampling_params"]
        warmth = 1.0 if ignores_temperature else sampling["temperature"]
        by_name = [[-0.1 * token / warmth, token, None] for token in named]
        meta["output_token_ids_logprobs"] = [by_name] * len(request.tokens)
    return {"text": "", "output_ids": request.tokens, "meta_info": meta}


def said(success: bool, message: str) -> web.Response:
    answer = {"success": success, "message": message}
    return web.json_response(answer, status=200 if success else 400)


async def broken(request: web.Request) -> web.StreamResponse:
    """Begin an answer, and break the connection."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.content_length = 1000
    await response.prepare(request)
    await response.write(b'{"text": "')
    assert request.transport is not None
    request.transport.abort()
    return response
