"""A small valid configuration, without importing torch."""

from __future__ import annotations

from typing import Any

from ratchet.config import Config, parse_config


def small_config(**sections: dict[str, Any]) -> Config:
    """Return the copy job in small; sections are merged over it."""
    base: dict[str, dict[str, Any]] = {
        "model": {
            "build": {
                "model_type": "qwen3",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 16,
                "max_position_embeddings": 64,
                "tie_word_embeddings": True,
            },
            "tokenizer_chars": "0123456789>",
        },
        "task": {"name": "copy", "args": {"digits": 3, "num_prompts": 500, "holdout": 100}},
        "rollout": {"max_tokens": 5, "group_size": 4},
        "buffer": {"batch_groups": 4},
        "trainer": {"num_steps": 3, "lr": 2e-3, "lr_warmup_steps": 0},
    }
    return parse_config(
        {name: base.get(name, {}) | sections.get(name, {}) for name in base | sections}
    )
