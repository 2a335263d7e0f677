"""A proof at start-up that the engine's batch and cache compute what the model computes.

Consumes a freshly loaded model, produces nothing, or the reason not to serve it. An architecture
whose layers keep more than keys and values, or place them otherwise, would else generate tokens
with wrong log probabilities without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from ratchet.backends.rollout._batch import Batch
from ratchet.backends.rollout._request import Request
from ratchet.backends.rollout.base import Completion, SamplingParams
from ratchet.errors import ConfigError, GenerationFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

_PROMPT_LENGTHS: Final = (2, 5)
_TOKENS: Final = 3
_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Of one log probability, between cached and plain forward passes."""


def check_generation(model: PreTrainedModel, name: str) -> None:
    """Generate greedily from two prompts of different length, and score the result without a cache.

    Args:
        model: in evaluation mode, on its device.
        name: what the user called it.

    Raises:
        ConfigError: if the two disagree, or the model does not run at all.
    """
    try:
        error = max(_disagreement(model, *done) for done in _generate(model))
        problem = None if error < _TOLERANCE[model.dtype] else f"log probabilities {error:.2g} off"
    except Exception as failure:
        raise _unserved(model, name, f"{type(failure).__name__}: {failure}") from failure
    if problem is not None:
        raise _unserved(model, name, problem)


def _unserved(model: PreTrainedModel, name: str, problem: str) -> ConfigError:
    return ConfigError(
        f"model.path = {name!r}: the torch engine does not generate what {type(model).__name__}"
        f" computes ({problem}); use another architecture, or another rollout.backend"
    )


def _generate(model: PreTrainedModel) -> Iterator[tuple[Request, Completion]]:
    vocabulary = model.get_input_embeddings().num_embeddings
    params = SamplingParams(_TOKENS, temperature=0.0, seed=0)
    requests = [
        Request([(7 * i + length) % vocabulary for i in range(length)], params)
        for length in _PROMPT_LENGTHS
    ]
    batch = Batch(model, eos=(), max_rows=len(requests))
    batch.stamp(0)
    batch.add(requests)
    while batch.has_work:
        for request, completion in batch.step():
            if isinstance(completion, GenerationFailed):
                raise completion
            yield request, completion


@torch.inference_mode()
def _disagreement(model: PreTrainedModel, request: Request, completion: Completion) -> float:
    tokens = torch.tensor(completion.token_ids.numpy(), dtype=torch.int64, device=model.device)
    prompt = torch.from_numpy(request.prompt).to(model.device)
    logits = model(input_ids=torch.cat([prompt, tokens])[None], use_cache=False).logits[0]
    scored = torch.log_softmax(logits[len(prompt) - 1 : -1].float(), dim=-1)
    expected = scored.gather(-1, tokens[:, None])[:, 0].cpu()
    return float((expected - torch.tensor(completion.logprobs.numpy())).abs().max())
