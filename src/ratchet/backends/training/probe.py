"""What the trainer's model makes of fixed token ids: the proof of engines that cannot be read back.

Consumes a model and a seed, produces a `WeightProbe`. Waits, on several ranks, for the others, as
every forward pass does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from ratchet.backends.training.sharding import drop_gathered
from ratchet.types import Packed, WeightProbe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUM_SEQUENCES: Final = 4
LENGTH: Final = 32
"""Tokens of a sequence: each layer attends to many, and a model's context holds more."""


def compute_probe(model: PreTrainedModel, device: torch.device, seed: int) -> WeightProbe:
    """Compute the log probabilities of random ids; another seed looks at other rows of the
    embedding.

    Args:
        model: in evaluation mode.
        device: of the model.
        seed: of the ids.
    """
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.get_input_embeddings().num_embeddings - 1  # SGLang scores its last id as 0
    ids = torch.randint(vocabulary, (NUM_SEQUENCES, LENGTH), generator=generator)
    try:
        with torch.no_grad():
            logits = model(input_ids=ids.to(device), use_cache=False).logits[:, :-1].float()
    finally:
        drop_gathered(model)
    logprobs = logits.log_softmax(-1).cpu().gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return WeightProbe(
        length=LENGTH,
        token_ids=Packed.of(ids.numpy(), "int32"),
        logprobs=Packed.of(logprobs.numpy(), "float32"),
    )
