"""How the prompts of a world are admitted: drawn apart, so that the rest of it stays as it was."""

from __future__ import annotations

import random
from typing import Any

LEAST_BYTES = 13
"""of a rollout: the configuration refuses a cap that cannot hold a batch of them"""


def draw_admission(seed: int, batch_groups: int, group_size: int) -> dict[str, Any]:
    """Return fields of [buffer]."""
    rng = random.Random(f"admission/{seed}")
    least = batch_groups * group_size * LEAST_BYTES
    return {
        "admission": rng.choice(["capacity", "capacity", "bounded"]),
        "max_bytes": rng.choice([None, None, None, least, least * 3, least * 8]),
    }
