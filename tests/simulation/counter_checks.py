"""What the buffer says of itself adds up: over all its windows, to what the ledger has seen.

`Ledgered.of` counts the events of a ledger; `check` compares them with what one life of the buffer
has handed out beside its batches, and with the window that is still open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ratchet.storage.ledger import GroupLedger

if TYPE_CHECKING:
    from tests.simulation.seen import Buffer

_EVENTS = "SELECT group_id, event, detail FROM events ORDER BY group_id, rowid"


class Ledgered(NamedTuple):
    """How often groups went where."""

    places: Counter[str]
    """offered | requeued | trained | lost"""
    dropped: Counter[str]
    again: Counter[str]
    """issued again, by reason"""

    @classmethod
    def of(cls, ledger: GroupLedger) -> Ledgered:
        found = cls(Counter(), Counter(), Counter())
        finished: dict[int, bool] = {}
        for group, event, detail in ledger._sql.execute(_EVENTS):
            match event:
                case "finished" | "requeued":
                    found.places["offered" if event == "finished" else event] += 1
                    finished[group] = True
                case "trained":
                    found.places["trained"] += 1
                    finished[group] = False
                case "dropped" | "retried":
                    # of what an earlier life had finished, the next one knows nothing
                    lost = finished.pop(group, False) and detail != "buffer_died"
                    found.places["lost"] += lost
                    (found.dropped if event == "dropped" else found.again)[detail] += 1
        return found


def check(buffer: Buffer) -> Iterator[str]:
    """Say what does not add up."""
    now = Ledgered.of(buffer._table._ledger)
    for name, said in _said(buffer)._asdict().items():
        expected = getattr(now, name)
        expected.subtract(getattr(buffer.began, name))
        if +said != +expected:
            yield f"{name}: the buffer says {+said}, the ledger {+expected}"


def _said(buffer: Buffer) -> Ledgered:
    found = Ledgered(Counter(), Counter(), Counter())
    window = buffer._table.window
    whole: list[Any] = [*buffer.told, window]
    for each in whole:
        found.dropped.update(each.dropped)
        found.again.update(each.retried)
        found.again.update(each.reissued)
    for name in ("offered", "trained", "lost"):
        found.places[name] += sum(getattr(stats, name).groups for stats in buffer.told)
        found.places[name] += getattr(window, name).num_groups
    found.places["requeued"] += sum(stats.requeued_groups for stats in buffer.told)
    found.places["requeued"] += window.num_requeued
    return found
