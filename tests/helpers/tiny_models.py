"""Model directories small enough to write in a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ratchet.backends.models import build_model, char_tokenizer, save_model_directory

CHARS: Final = "0123456789+-=abcdefgh"

TINY: Final[dict[str, dict[str, Any]]] = {
    "qwen3": {
        "model_type": "qwen3",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    },
    "llama": {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 64,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
    },
    "mistral": {
        "model_type": "mistral",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "sliding_window": 4,
        "max_position_embeddings": 4096,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 4096,
    },
}
"""One per way of attending: grouped heads, own positions, sliding windows, a mixture. Weights are
drawn wide, so that a wrong mask moves the logits far beyond rounding.
"""

for _config in TINY.values():
    _config["initializer_range"] = 0.3


def write_tiny_model(
    path: Path, model_type: str = "qwen3", *, seed: int = 0, **changes: Any
) -> Path:
    """Write a random model and its tokenizer of one token per character."""
    tokenizer = char_tokenizer(CHARS)
    model = build_model({**TINY[model_type], **changes}, seed, tokenizer)
    save_model_directory(model, tokenizer, path)
    return path
