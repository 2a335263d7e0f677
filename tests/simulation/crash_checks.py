"""What was told before a crash is on the disk after it.

Consumes messages and the disk after each crash, produces what is wrong there. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.records import is_a_life, life_of

from ratchet.actors.role import BUFFER
from ratchet.messages import (
    BatchReady,
    Message,
    PromptsClaimed,
    VersionCommitted,
    VersionReserved,
)
from ratchet.storage.ledger import GroupLedger, GroupRow
from ratchet.storage.versions import VersionStore

if TYPE_CHECKING:
    from tests.simulation.lives import Crash


class CrashChecks:
    """Of one world."""

    def __init__(self, expect: Callable[[bool, str, str], None]) -> None:
        self.num_lives = 1
        """of the buffer"""
        self._expect = expect
        self._promised: set[int] = set()
        self._live: set[int] = set()
        self._claims: dict[int, int] = {}
        self._batched: dict[int, int] = {}

    def told(self, message: Message) -> None:
        """Note what its receiver may rely on from now on."""
        match message:
            case PromptsClaimed():
                self._claims.update((a.group_id, a.attempt) for a in message.assignments)
            case BatchReady():
                self._batched.update((g.group_id, g.attempt) for g in message.batch.groups)
            case VersionReserved():
                self._promised.add(message.version)
            case VersionCommitted():
                self._live.add(message.version)
            case _:
                pass

    def look(self, crash: Crash) -> None:
        """What others were told is on the disk, and the disk makes sense."""
        self.num_lives += crash.name == BUFFER
        store = VersionStore.open(crash.versions)
        records = {record.version: record for record in store.records()}
        self._expect(self._promised <= records.keys(), "I1", "a reserved number was lost")
        lost = {v for v in self._live if v not in records or records[v].state != "live"}
        self._expect(not lost, "I1", f"commits of {lost} were lost")
        term = store.acquire_term("next", "next", 0.0)
        number = store.reserve(term, 10**6, max(records, default=None), 0.0)
        self._expect(number not in self._promised, "I1", f"{number} is given again")
        store.close()
        ledger = GroupLedger.open(crash.ledger)
        rows = {row.group_id: row for row in ledger.groups()}
        for row in rows.values():
            events = life_of(ledger.events(row.group_id))
            self._expect(is_a_life(events), "I3", f"on disk {row.group_id} went {events}")
        cursor = ledger.load_cursor()
        issued = sum(row.epoch == cursor.epoch for row in rows.values())
        self._expect(issued == cursor.position, "I3", f"{cursor} on disk, {issued} issued")
        if not crash.power:
            self._on_disk(rows, self._claims, {"issued"})
            self._on_disk(rows, self._batched, {"issued", "claimed"})
        ledger.close()

    def _on_disk(self, rows: dict[int, GroupRow], told: dict[int, int], before: set[str]) -> None:
        for group_id, attempt in told.items():
            row = rows.get(group_id)
            later = row is not None and row.attempt > attempt
            there = row is not None and row.attempt == attempt and row.state not in before
            self._expect(later or there, "I3", f"group {group_id}/{attempt} on disk: {row}")
