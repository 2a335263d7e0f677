"""Models of versions, each drawn from its own seed: a token's log probability tells which of them
has made it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tests.helpers.tiny_models import CHARS, TINY

from ratchet.backends.models import build_model, char_tokenizer
from ratchet.backends.named_weights import named_weights, weight_specs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ratchet.backends.rollout.base import Completion
    from ratchet.types import PauseMode

CLOSE = 1e-4
"""Log probabilities of one model differ by less between a real server and this process."""


def model_of(version: int, mode: PauseMode = "retract") -> PreTrainedModel:
    """Return the model of a version. For "in_place" it is one whose layers add nothing: a token
    then depends on the one before and the embedding alone, whatever made the keys and values.
    """
    model = build_model(TINY["qwen3"], 1000 + version, char_tokenizer(CHARS))
    torch.manual_seed(version)
    if mode == "in_place":
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "o_proj" in name or "down_proj" in name:
                    weight.zero_()
            model.get_parameter("model.norm.weight").normal_()  # or a token repeats for ever
    return model


def tensors_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    weights = named_weights(model)
    travels = [spec.name for spec in weight_specs(weights) if spec.alias_of is None]
    return {name: weights[name].detach() for name in travels}


def differences(model: Any, completion: Completion, prompt: Sequence[int]) -> torch.Tensor:
    """Return how far each token's log probability is from what a model computes."""
    ids = torch.tensor([[*prompt, *completion.token_ids.numpy().tolist()]])
    said = torch.tensor(completion.logprobs.numpy().copy())
    with torch.no_grad():
        logprobs = model(ids).logits[0].log_softmax(-1)
    own = logprobs[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None])[:, 0]
    return (own - said).abs()


def error_of(
    completion: Completion, prompt: Sequence[int], models: Mapping[int, PreTrainedModel]
) -> float:
    """Return how far a token's log probability is at most from what its own version computes."""
    return max(
        float(differences(models[s.version], completion, prompt)[s.start : s.end].max())
        for s in completion.spans
    )
