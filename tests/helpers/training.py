"""A tiny policy and batches for it, shared by the tests and benchmarks of the training backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tests.helpers.config import small_config

from ratchet.backends.models import build_model, char_tokenizer, save_model_directory
from ratchet.config import Config
from ratchet.types import Packed, Prompt, Rollout, RolloutGroup, VersionSpan

CHARS = "0123456789>"
FIRST_CHAR_ID = 3
VOCABULARY = FIRST_CHAR_ID + len(CHARS)


def training_config(**sections: dict[str, Any]) -> Config:
    """Return the small copy job for one step; sections are merged over it."""
    trainer = {"num_steps": 1, "lr": 2e-3, "lr_warmup_steps": 0} | sections.pop("trainer", {})
    return small_config(trainer=trainer, **sections)


def write_model(config: Config, path: Path) -> Path:
    """Write the base model of a configuration; return its directory."""
    assert config.model.build is not None
    assert config.model.tokenizer_chars is not None
    tokenizer = char_tokenizer(config.model.tokenizer_chars)
    save_model_directory(build_model(config.model.build, config.seed, tokenizer), tokenizer, path)
    return path


def make_groups(
    num_groups: int = 4,
    group_size: int = 4,
    *,
    prompt_tokens: tuple[int, int] = (2, 6),
    completion_tokens: tuple[int, int] = (1, 5),
    seed: int = 0,
) -> list[RolloutGroup]:
    """Return groups of random tokens and rewards; lengths are drawn from inclusive ranges."""
    generator = np.random.default_rng(seed)

    def tokens(limits: tuple[int, int]) -> np.ndarray:
        size = generator.integers(limits[0], limits[1], endpoint=True)
        return generator.integers(FIRST_CHAR_ID, VOCABULARY, size)

    def rollout(prompt: np.ndarray) -> Rollout:
        completion = tokens(completion_tokens)
        size = len(completion)
        return Rollout(
            prompt_ids=Packed.of(prompt, "int32"),
            completion_ids=Packed.of(completion, "int32"),
            behavior_logprobs=Packed.of(generator.normal(-2.6, 0.2, size), "float32"),
            loss_mask=Packed.of(np.ones(size), "uint8"),
            spans=(VersionSpan(0, 0, size),),
            finish_reason="stop",
            reward=float(generator.integers(0, 5)) / 4,
            seed=0,
        )

    def group(group_id: int) -> RolloutGroup:
        prompt = tokens(prompt_tokens)
        rollouts = tuple(rollout(prompt) for _ in range(group_size))
        return RolloutGroup(group_id, 0, f"p{group_id}", 0, rollouts)

    return [group(group_id) for group_id in range(num_groups)]


def copy_prompts(num: int = 64, digits: int = 2) -> list[Prompt]:
    """Return prompts that ask for a copy of some digits, with the copy as reference."""
    generator = np.random.default_rng(1)
    texts = ["".join(map(str, generator.integers(0, 10, digits))) for _ in range(num)]
    return [Prompt(f"{index}", f"{text}>", reference=text) for index, text in enumerate(texts)]
