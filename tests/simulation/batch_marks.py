"""The batch filter of a world: code as a user writes it, and what must hold of what it has marked.

Drawn apart from the rest of a world. It decides by the numbers of groups and rollouts alone, so
that what it said can be computed again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ratchet.types import RolloutGroup

if TYPE_CHECKING:
    from tests.simulation.world import World


def is_marked(group_id: int, index: int) -> bool:
    """One rollout in five, and now and then a whole group."""
    return (group_id + index) % 5 == 4 or group_id % 11 == 7


class Marks:
    """A `BatchFilter` that takes a while."""

    async def marks(self, groups: Sequence[RolloutGroup]) -> list[list[bool]]:
        await asyncio.sleep(0.05)
        return [
            [is_marked(group.group_id, index) for index in range(len(group.rollouts))]
            for group in groups
        ]

    def close(self) -> None:
        pass


def draw_batch_filter(seed: int) -> dict[str, Any]:
    """Return a field of [buffer]; only whether it is there matters."""
    if random.Random(f"marks/{seed}").random() > 0.2:
        return {}
    return {"batch_filter": f"{__name__}:is_marked"}


def check(world: World) -> Iterator[str]:
    """Say which marked samples were trained all the same."""
    if world.config.buffer.batch_filter is None:
        return
    for trainer in world.trainers:
        for (group_id, _), rollouts in trainer.backend.trained_rollouts.items():
            wrong = [i for i, used in enumerate(rollouts) if used and is_marked(group_id, i)]
            if wrong:
                yield f"rollouts {wrong} of group {group_id} are marked, and were trained"
    for row in world.ledger.groups("trained"):
        if all(is_marked(row.group_id, i) for i in range(row.num_rollouts or 0)):
            yield f"group {row.group_id} is marked as a whole, and counts as trained"
