"""The section [model]: the policy. Pure; waits for nothing."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import field_validator, model_validator

from ratchet.config.section import Positive, Section


class LoraConfig(Section):
    """A LoRA adapter (arXiv:2106.09685): it alone is trained and travels; the base model stays as
    it is. With this section, even an empty one, it is on.
    """

    rank: Positive = 16
    alpha: Positive = 32
    """The adapter adds alpha / rank x B A to each weight."""
    dropout: float = 0.0
    """Only 0: see the error."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names of linear modules, or the ends of names ("q_proj"), or every linear module but the
    output layer.
    """
    export_merged: bool = False
    """Beside the adapter, export the base model with the adapter merged in, as `merged`."""

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, value: float) -> float:
        if value != 0.0:
            msg = (
                f"dropout = {value} is refused: the trainer must compute the very probabilities"
                " that the engines sampled with, and engines generate without dropout; use 0"
            )
            raise ValueError(msg)
        return value

    @field_validator("target_modules", mode="before")
    @classmethod
    def _some_targets(cls, value: object) -> object:
        if value == "all-linear":
            return value
        if (
            isinstance(value, list | tuple)
            and value
            and all(isinstance(name, str) and name for name in value)
        ):
            return tuple(value)
        msg = (
            f'{value!r} is neither "all-linear" nor a list of names of linear modules, such as'
            ' ["q_proj", "v_proj"]'
        )
        raise ValueError(msg)


class ModelConfig(Section):
    """The policy: a local Hugging Face directory, or a fresh model from a config."""

    path: str | None = None
    """A local directory with config, weights and tokenizer."""
    build: dict[str, Any] | None = None
    """Hugging Face config of a fresh model with random weights, `model_type` included."""
    tokenizer_chars: str | None = None
    """With `build`: a tokenizer of one token per character of this string (pad, eos and unk are
    added).
    """
    chat_template: bool = False
    """Wrap each prompt as a user message with the tokenizer's chat template."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora: LoraConfig | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.build is None):
            msg = (
                "give exactly one of model.path (a local directory) and model.build (a fresh model)"
            )
            raise ValueError(msg)
        if self.build is not None and self.tokenizer_chars is None:
            msg = "model.build needs model.tokenizer_chars"
            raise ValueError(msg)
        if self.build is not None and "model_type" not in self.build:
            msg = 'model.build needs a model_type, for example "qwen3"'
            raise ValueError(msg)
        return self
