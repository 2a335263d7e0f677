"""What an engine has to know of the model that its servers run, without its weights.

Consumes a model directory, produces names and shapes, a tokenizer and sizes. Waits for the disk
only. The model is built on the meta device: it takes no memory, however large it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from ratchet.backends.models import building, eos_token_ids, load_tokenizer
from ratchet.backends.named_weights import named_weights, weight_specs
from ratchet.backends.rollout._text import TextCodec
from ratchet.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from ratchet.config import ModelConfig
    from ratchet.transport.weights.base import TensorSpec


class ServedModel(NamedTuple):
    """What the servers of an engine run."""

    model: PreTrainedModel
    """on the meta device"""
    text: TextCodec
    specs: tuple[TensorSpec, ...]
    """of the whole model, as the trainer's names it"""
    vocabulary: int
    context: int | None

    @classmethod
    def read(cls, directory: Path, config: ModelConfig) -> ServedModel:
        """Read a directory in the Hugging Face layout.

        Raises:
            ConfigError: if it cannot be used.
        """
        tokenizer = load_tokenizer(directory)
        model = _meta_model(directory, config.dtype)
        text = TextCodec(tokenizer, config.chat_template, eos_token_ids(model, tokenizer))
        return cls(
            model=model,
            text=text,
            specs=weight_specs(named_weights(model)),
            vocabulary=model.get_input_embeddings().num_embeddings,
            context=getattr(model.config, "max_position_embeddings", None),
        )


def _meta_model(directory: Path, dtype: str) -> PreTrainedModel:
    with building():
        try:
            config = AutoConfig.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
            if (directory / "generation_config.json").is_file():
                model.generation_config = GenerationConfig.from_pretrained(
                    directory, local_files_only=True
                )
        except (OSError, ValueError, KeyError, AttributeError, RuntimeError) as error:
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            msg = (
                f"model.path = {str(directory)!r} cannot be read: {line}; give a local directory"
                " with config.json, model.safetensors and a tokenizer, as save_pretrained writes it"
            )
            raise ConfigError(msg) from error
    return model.eval()
