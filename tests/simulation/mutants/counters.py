"""Faults of what the buffer says of itself: counters that run on, or miss something."""

from __future__ import annotations

from typing import Any

from tests.simulation.mutants.base import Patches, mutant

from ratchet.actors.group_table import GroupTable
from ratchet.actors.window import Window


@mutant("window counters are read and not reset", seed=3)
def counters_run_on() -> Patches:
    def read(self: Any) -> Window:
        return self._window

    return [(GroupTable, "take_window", read)]


@mutant("what is thrown away is in no distribution", seed=3)
def loss_is_not_counted() -> Patches:
    def forget(self: Any, prompt_id: str, made: Any) -> None:
        return

    return [(Window, "has_lost", forget)]
