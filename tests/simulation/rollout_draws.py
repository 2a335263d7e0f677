"""How the workers of a world submit, and how many turns its task has: drawn apart from the rest."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from ratchet.backends.rollout.base import SamplingParams
from ratchet.config import Config


def draw_submission(config: Config, seed: int) -> Config:
    """Let some worlds submit by sample, with slots for fewer groups than there is room for."""
    rng = random.Random(f"submission/{seed}")
    most = (config.most_open_groups - 1) // config.rollout.num_workers
    if rng.random() < 0.5 or most < 1:
        return config
    changes = {"submission": "sample", "max_concurrent_groups": rng.randint(1, most)}
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=changes)})


def draw_turns(config: Config, seed: int) -> int:
    """Return the turns of the task: more than one where no filter judges lengths."""
    rng = random.Random(f"turns/{seed}")
    return 1 if config.buffer.min_tokens is not None else rng.choice([1, 1, 1, 2, 3])


def stop_after(num_turns: int) -> Callable[[Sequence[int], SamplingParams], int] | None:
    """Return where completions end by themselves: in a task of several turns about half of them."""
    if num_turns == 1:
        return None
    return lambda _, params: 1 + params.seed % max(1, 2 * params.max_tokens - 1)
