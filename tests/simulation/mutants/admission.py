"""Faults of the room that the buffer gives out: counted twice, never given back, or too early."""

from __future__ import annotations

from typing import Any

from tests.simulation.mutants.base import Patches, mutant
from tests.simulation.ordinary import ordinary

from ratchet.actors.group_table import GroupTable
from ratchet.actors.issuing import Issuing


def _drifting(method: str, groups_of: Any, sign: int) -> Patches:
    """After each call of a method of the table, its groups are counted once more, or once less."""
    original, num_open = getattr(GroupTable, method), GroupTable.open_groups.fget
    assert num_open is not None

    def counted(self: Any, *args: Any) -> Any:
        self._drift = getattr(self, "_drift", 0) + sign * groups_of(*args)
        return original(self, *args)

    def open_groups(self: Any) -> Any:
        groups = num_open(self)
        return groups._replace(num_in_flight=groups.num_in_flight + getattr(self, "_drift", 0))

    return [(GroupTable, method, counted), (GroupTable, "open_groups", property(open_groups))]


@mutant("a batch frees its room when it is taken, and again when it is trained", seed=3)
def room_freed_twice() -> Patches:
    return _drifting("train", lambda ids, *_: len(ids), -1)


@mutant(
    "a dropped group keeps its room",
    world=ordinary(buffer={"filters": ["zero_spread"]}, trainer={"batch_timeout_s": 300.0}),
)
def room_of_the_dropped_lost() -> Patches:
    return _drifting("drop", lambda *_: 1, 1)


@mutant("bounded: a slot is freed by the step, not by the version trained on it", seed=3)
def room_freed_by_the_step() -> Patches:
    def room(self: Any, version: int = 0) -> int:
        return self._admission.room(self._table.open_groups, 0)

    return [(Issuing, "room", room)]
