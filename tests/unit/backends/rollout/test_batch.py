"""The batch against plain forward passes of transformers, step by step on this thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.tiny_models import CHARS, TINY
from transformers import DynamicCache

from ratchet.backends.models import build_model, char_tokenizer
from ratchet.backends.rollout import _batch
from ratchet.backends.rollout._batch import Batch
from ratchet.backends.rollout._request import Request
from ratchet.backends.rollout.base import Completion, SamplingParams
from ratchet.errors import GenerationFailed


@pytest.fixture(scope="module", params=sorted(TINY))
def any_model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


@pytest.fixture
def model() -> Any:
    return tiny("qwen3")


def tiny(model_type: str, seed: int = 0) -> Any:
    return build_model(TINY[model_type], seed, char_tokenizer(CHARS))


def request(
    prompt: Sequence[int], max_tokens: int, temperature: float = 1.0, seed: int = 0
) -> Request:
    return Request(prompt, SamplingParams(max_tokens, temperature, seed))


def batch_of(model: Any, max_rows: int = 16, eos: Sequence[int] = ()) -> Batch:
    batch = Batch(model, eos, max_rows)
    batch.stamp(0)
    return batch


def finish(batch: Batch) -> dict[Request, Completion]:
    done: dict[Request, Completion] = {}
    while batch.has_work:
        done |= step(batch)
    return done


def step(batch: Batch) -> dict[Request, Completion]:
    done = {}
    for finished, completion in batch.step():
        assert isinstance(completion, Completion), completion
        done[finished] = completion
    return done


@torch.inference_mode()
def scores(model: Any, prompt: Sequence[int], completion: Completion) -> torch.Tensor:
    """The logits [C, V] that a plain pass over prompt and completion gives each of its tokens."""
    ids = torch.tensor([[*prompt, *completion.token_ids.numpy().tolist()]])
    return model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]


def assert_scored(model: Any, asked: Request, completion: Completion, start: int = 0) -> None:
    """Compare from token `start` on."""
    logits = scores(model, asked.prompt.tolist(), completion)[start:]
    tokens = torch.from_numpy(completion.token_ids.numpy()[start:].astype(np.int64))
    temperature = asked.params.temperature
    if temperature == 0:
        assert torch.equal(logits.argmax(-1), tokens)
    expected = torch.log_softmax(logits / (temperature or 1.0), -1).gather(-1, tokens[:, None])
    actual = completion.logprobs.numpy()[start:]
    np.testing.assert_allclose(actual, expected[:, 0].numpy(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("heat", [0.0, 0.7, 1.0])
def test_staggered_sequences_are_scored_as_by_a_plain_pass(any_model: Any, heat: float) -> None:
    batch, done = batch_of(any_model), {}
    asked = [
        request([3 + (7 * i + j) % len(CHARS) for j in range(1 + i % 9)], 1 + 5 * i % 23, heat, i)
        for i in range(20)
    ]
    for i, joining in enumerate(asked):  # more than the batch has room for, one or two at a time
        batch.add([joining])
        if i % 3:
            done |= step(batch)
    done |= finish(batch)
    assert done.keys() == set(asked)
    for sequence, completion in done.items():
        assert len(completion.token_ids) == sequence.params.max_tokens
        assert_scored(any_model, sequence, completion)


def test_the_check_sees_a_wrong_logprob(model: Any) -> None:
    batch, asked = batch_of(model), request([4, 5], 4)
    batch.add([asked])
    completion = finish(batch)[asked]
    shifted = completion.logprobs.numpy() + np.float32(3e-4)
    wrong = completion._replace(logprobs=completion.logprobs.of(shifted, "float32"))
    with pytest.raises(AssertionError):
        assert_scored(model, asked, wrong)


def test_memory_grows_past_every_first_size(model: Any) -> None:
    batch = batch_of(model, max_rows=64)
    early = [request([4 + i], 50, seed=i) for i in range(3)]
    late = [request([5] * (20 + i), 20, seed=i) for i in range(20)]
    batch.add(early)
    for _ in range(20):
        batch.step()
    batch.add(late)
    done = finish(batch)
    for sequence in (*early, *late):
        assert_scored(model, sequence, done[sequence])


def test_a_crowd_changes_nothing_but_rounding(model: Any) -> None:
    alone, crowd = batch_of(model), batch_of(model)
    asked = request([4, 5, 6], 20, seed=11)
    alone.add([asked])
    expected = finish(alone)[asked]
    again = request([4, 5, 6], 20, seed=11)
    crowd.add([*(request([6] * n, 3 * n, seed=n) for n in range(1, 9)), again])
    actual = finish(crowd)[again]
    assert actual.token_ids == expected.token_ids
    np.testing.assert_allclose(actual.logprobs.numpy(), expected.logprobs.numpy(), atol=1e-5)


def test_siblings_share_one_prefill_and_differ_by_seed(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = []
    forward = type(model).forward

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        shapes.append(tuple(kwargs["input_ids"].shape))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", counting)
    batch = batch_of(model)
    siblings = [request([4, 5, 6], 8, seed=i) for i in range(6)]
    batch.add([*siblings, request([7], 8)])
    done = finish(batch)
    assert shapes == [(2, 3)] + [(7, 1)] * 7
    assert len({done[s].token_ids.data for s in siblings}) == 6
    for sibling in siblings:
        assert_scored(model, sibling, done[sibling])


def test_at_most_max_rows_run_and_the_first_come_first(model: Any) -> None:
    batch = batch_of(model, max_rows=2)
    asked = [request([4 + i], 2 + i, seed=i) for i in range(5)]
    batch.add(asked)
    order = []
    while batch.has_work:
        order += [finished for finished, _ in batch.step()]
        assert batch.num_running <= 2
    assert order[0] is asked[0]
    assert sorted(map(asked.index, order)) == [0, 1, 2, 3, 4]


def test_a_long_queue_is_prefilled_in_pieces(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_batch, "PREFILL_TOKENS", 20)
    batch = batch_of(model)
    asked = [request([4] * length, 3, seed=length) for length in (8, 2, 9, 25, 1)]
    batch.add(asked)
    running = []
    while batch.waiting:
        batch.step()
        running.append(batch.num_running)
    assert running == [2, 3, 4, 5]
    done = finish(batch)
    for sequence in asked:
        assert_scored(model, sequence, done[sequence])


def test_the_end_of_sequence_token_ends_and_is_kept(model: Any) -> None:
    batch, asked = batch_of(model), request([4, 5], 30, temperature=0.0)
    batch.add([asked])
    tokens = finish(batch)[asked].token_ids.numpy().tolist()
    eos = tokens[4]
    assert tokens.index(eos) == 4
    stopping = batch_of(model, eos=[eos])
    again = request([4, 5], 30, temperature=0.0)
    stopping.add([again])
    completion = finish(stopping)[again]
    assert completion.token_ids.numpy().tolist() == tokens[:5]
    assert completion.finish_reason == "stop"


def load(model: Any, seed: int) -> None:
    new = tiny("qwen3", seed)
    with torch.no_grad():
        for old, value in zip(model.parameters(), new.parameters(), strict=True):
            old.copy_(value)


def test_after_a_retraction_the_caches_are_those_of_the_new_weights(model: Any) -> None:
    batch = batch_of(model)
    asked = [request([4, 5, 6 + i][: 1 + i], 12 + i, seed=i) for i in range(3)]
    batch.add(asked)
    for _ in range(5):
        batch.step()
    batch.retract()
    assert (batch.num_running, len(batch.waiting)) == (0, 3)
    load(model, 1)
    batch.stamp(8)
    done = finish(batch)
    for sequence in asked:
        completion = done[sequence]
        assert [tuple(s) for s in map(span_fields, completion.spans)] == [
            (0, 0, 5),
            (8, 5, len(completion.token_ids)),
        ]
        assert_scored(tiny("qwen3", 0), sequence, truncated(completion, 5))
        assert_scored(model, sequence, completion, start=5)


def span_fields(span: Any) -> tuple[int, int, int]:
    return span.version, span.start, span.end


def truncated(completion: Completion, length: int) -> Completion:
    return completion._replace(
        token_ids=completion.token_ids.of(completion.token_ids.numpy()[:length], "int32"),
        logprobs=completion.logprobs.of(completion.logprobs.numpy()[:length], "float32"),
    )


@torch.inference_mode()
def test_in_place_keeps_the_old_caches(model: Any) -> None:
    batch, asked = batch_of(model), request([4, 5], 10, seed=3)
    batch.add([asked])
    for _ in range(4):
        batch.step()
    load(model, 1)
    batch.stamp(8)
    completion = finish(batch)[asked]
    tokens = completion.token_ids.numpy().tolist()
    cache, old = DynamicCache(config=model.config), tiny("qwen3", 0)
    old(input_ids=torch.tensor([[4, 5, *tokens[:3]]]), cache=cache, use_cache=True)
    logits = model(input_ids=torch.tensor([tokens[3:-1]]), cache=cache, use_cache=True).logits[0]
    expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens[4:])[:, None])[:, 0]
    np.testing.assert_allclose(completion.logprobs.numpy()[4:], expected.numpy(), atol=1e-4, rtol=0)
    plain = torch.log_softmax(scores(model, [4, 5], completion), -1)[4:]
    fresh = plain.gather(-1, torch.tensor(tokens[4:])[:, None])[:, 0]
    assert (fresh - expected).abs().max() > 0.01


def test_versions_that_made_nothing_leave_no_span(model: Any) -> None:
    batch, asked = batch_of(model), request([4], 4)
    batch.add([asked])
    batch.step()
    batch.stamp(1)
    batch.stamp(2)
    batch.step()
    batch.stamp(2)
    completion = finish(batch)[asked]
    assert [span_fields(s) for s in completion.spans] == [(0, 0, 1), (2, 1, 4)]


def test_sequences_can_be_removed_wherever_they_are(model: Any) -> None:
    batch = batch_of(model, max_rows=4)
    asked = [request([4 + i], 9, seed=i) for i in range(6)]
    batch.add(asked)
    batch.step()
    batch.step()
    for gone in (asked[0], asked[2], asked[5], request([4], 1)):
        batch.remove(gone)
    done = finish(batch)
    assert done.keys() == {asked[1], asked[3], asked[4]}
    for sequence, completion in done.items():
        assert_scored(model, sequence, completion)


def test_weights_that_are_not_finite_fail_what_they_made_and_poison_nothing(model: Any) -> None:
    batch = batch_of(model)
    batch.add([request([4, 5, 6, 7], 20, seed=i) for i in range(3)])
    for _ in range(5):
        batch.step()
    good = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.fill_(torch.nan)
    outcomes = batch.step()
    assert len(outcomes) == 3
    for _, failure in outcomes:
        assert isinstance(failure, GenerationFailed)
        assert "version 0" in str(failure)
    assert not batch.has_work
    model.load_state_dict(good)
    # the long one makes attention reach over the short one's slots that hold NaN now
    short, long = request([4], 6), request([5] * 12, 6)
    batch.add([short])
    batch.step()
    batch.add([long])
    done = finish(batch)
    assert_scored(model, short, done[short])
    assert_scored(model, long, done[long])


def test_it_counts_tokens(model: Any) -> None:
    batch = batch_of(model)
    batch.add([request([4], 3), request([5, 6], 7)])
    finish(batch)
    assert batch.generated_tokens == 10
