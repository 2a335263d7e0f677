"""What the tables of versions and groups must look like, told from their rows alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from ratchet.storage.groups import GroupEvent
from ratchet.types import VersionRecord

STEP_LOST = "step_lost"
"""the weights that were trained on it are gone, and a new trainer was not"""
_NEXT = {
    "issued": {"claimed"},
    "claimed": {"finished", "retried", "dropped"},
    "finished": {"masked", "batched", "retried", "dropped"},
    "masked": {"masked", "batched", "retried", "dropped"},
    "batched": {"trained", "retried", "dropped"},
    "requeued": {"masked", "batched", "retried", "dropped"},
    "retried": {"claimed", "requeued"},
    "trained": {STEP_LOST, "committed"},
    "committed": {STEP_LOST},
    STEP_LOST: {"claimed", "requeued"},
    "dropped": set(),
}


def distance(records: dict[int, VersionRecord], token: int, trainer: int) -> int:
    """Optimiser steps from one version to another through the tree."""

    def line(version: int) -> list[int]:
        path = []
        node: int | None = version
        while node is not None:
            path.append(node)
            node = records[node].parent
        return path

    above = set(line(trainer))
    meet = next((version for version in line(token) if version in above), None)
    if meet is None:
        return 10**9
    return records[token].step + records[trainer].step - 2 * records[meet].step


def life_of(events: Iterable[GroupEvent]) -> list[str]:
    """Return what became of a group, in order."""
    return [STEP_LOST if e.detail == STEP_LOST else e.event for e in events]


def is_a_life(events: list[str]) -> bool:
    """Return whether a group may go through these."""
    if not events or events[0] != "issued":
        return False
    return all(b in _NEXT[a] for a, b in itertools.pairwise(events))
