"""The verdicts of a world: filters, the unused handler, and rollouts that engines abort.

Drawn apart from the rest of a world. Code as a user writes it is named by its module, and decides
by the group alone, so that a world is the same each time.
"""

from __future__ import annotations

import random
from typing import Any

from tests.simulation import faults as f

from ratchet.types import RolloutGroup, UnusedGroup

HANDLER = f"{__name__}:by_reason"
FILTER = f"{__name__}:most"
MOST_SABOTAGE_S = 3600.0
"""A trainer rightly gives up a batch that nothing can be finished for, for `batch_timeout_s`."""


def by_reason(unused: UnusedGroup) -> str:
    """An unused handler: each of the three answers, also where it cannot be."""
    if unused.reason == "stale":
        return ("mask", "retry", "drop")[(unused.staleness or 0) % 3]
    return "retry" if unused.retries < 2 else "mask"


def most(group: RolloutGroup) -> bool:
    """A filter that rejects one prompt's group in five."""
    return group.epoch % 5 != 4


def draw_verdicts(seed: int, max_tokens: int, *, hopeless: bool) -> dict[str, Any]:
    """Return fields of [buffer]; with `hopeless` no group is ever kept."""
    rng = random.Random(f"verdicts/{seed}")
    unused = rng.choice([None, None, None, "mask", "mask", HANDLER])  # None: as it was drawn
    more: list[dict[str, Any]] = [
        {"filters": []},
        {"filters": []},
        {"filters": ["any_aborted"]},
        {"filters": [FILTER]},
        {"filters": ["too_short", "too_long"], "min_tokens": max_tokens, "max_tokens": max_tokens},
    ]
    fields = rng.choice(more)
    if hopeless:
        fields = {"filters": ["too_short"], "min_tokens": max_tokens + 1}
    return fields | ({} if unused is None else {"unused": unused})


def draw_faults(seed: int, horizon: float) -> list[f.Fault]:
    """Return times in which engines abort what they generate."""
    rng = random.Random(f"aborts/{seed}")
    if rng.random() > 0.3:
        return []
    at = round(rng.uniform(0, 0.7) * horizon, 3)
    for_s = min(rng.choice([1.0, horizon / 4, horizon]), MOST_SABOTAGE_S)
    return [f.Sabotage(at, "abort", rng.choice([0.05, 0.4, 1.0]), for_s)]
