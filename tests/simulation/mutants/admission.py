"""Faults of the room that the buffer gives out: counted twice, never given back, or too early."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.simulation.lives import Delays
from tests.simulation.mutants.base import Patches, mutant
from tests.simulation.ordinary import ordinary

from ratchet.actors.due_first import DueFirst
from ratchet.actors.group_table import GroupTable
from ratchet.actors.issuing import Issuing

if TYPE_CHECKING:
    from tests.simulation.plan import Plan


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


def _tight(delays: Delays) -> Plan:
    """Two workers with a group each, and at most one step between a group and its training."""
    return ordinary(
        delays=delays,
        rollout={"num_workers": 2, "max_concurrent_groups": 1, "group_timeout_s": 300.0},
        buffer={"admission": "bounded", "batch_groups": 1, "max_staleness": 1, "lease_s": 400.0},
    )


@mutant(
    "bounded: a slot is freed by the step, not by the version trained on it",
    world=_tight(Delays()),
)
def room_freed_by_the_step() -> Patches:
    def room(self: Any, version: int = 0) -> int:
        return self._admission.room(self._table.open_groups, 0)

    return [(Issuing, "room", room)]


@mutant(
    "bounded: the first come are trained although another group must go",
    world=_tight(Delays(step_s=0.5, token_s=10.0)),  # some groups take eight times as long
)
def first_come_although_one_is_due() -> Patches:
    def choose(self: Any, position: Any) -> Any:
        del position
        return list(self._table.queue.groups)[: self._size]

    return [(DueFirst, "choose", choose)]
