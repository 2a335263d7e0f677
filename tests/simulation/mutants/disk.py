"""Faults of what is kept: told before it is on the disk, ahead of it, or lost with the process."""

from __future__ import annotations

from typing import Any

from tests.simulation import faults as f
from tests.simulation.mutants.base import Patches, mutant
from tests.simulation.ordinary import ordinary

from ratchet.actors.group_table import GroupTable
from ratchet.actors.role import BUFFER, REGISTRY
from ratchet.storage.ledger import GroupLedger
from ratchet.storage.sqlite import Database
from ratchet.storage.versions import VersionStore

REGISTRY_DIES = ordinary(f.Crash(100.0, REGISTRY, power=False))
REGISTRY_LOSES_POWER = ordinary(f.Crash(100.0, REGISTRY, power=True))
BUFFER_DIES = ordinary(f.Crash(100.0, BUFFER, power=False))


def _left_open(method: str) -> Patches:
    """A write of the store that is on the disk only after the next one like it."""
    write = getattr(VersionStore, method)

    def lazily(self: Any, *args: Any) -> Any:
        if self._sql.in_transaction:
            self._sql.execute("COMMIT")
        self._sql.execute("BEGIN")
        return write(self, *args)

    return [(VersionStore, method, lazily)]


@mutant("a number is answered before it is written", world=REGISTRY_DIES)
def number_told_before_it_is_written() -> Patches:
    return _left_open("reserve")


@mutant("a version is announced before its commit is written", world=REGISTRY_DIES)
def announced_before_it_is_written() -> Patches:
    return _left_open("commit")


@mutant("a number is answered before it is synced", world=REGISTRY_LOSES_POWER)
def number_told_before_it_is_synced() -> Patches:
    opened = Database.open.__func__  # type: ignore[attr-defined]

    def lax(cls: Any, path: Any, schema: Any, *, synchronous: str, run: Any = None) -> Any:
        return opened(cls, path, schema, synchronous="NORMAL", run=run)

    return [(Database, "open", classmethod(lax))]


@mutant("prompts are handed out before the ledger has them", seed=82)
def told_before_the_ledger() -> Patches:
    def postponed(self: Any) -> None:
        self._flushes = getattr(self, "_flushes", 0) + 1
        if self._flushes % 500 == 0:
            flush(self)

    flush = GroupTable.flush
    return [(GroupTable, "flush", postponed)]


@mutant("the cursor runs ahead of the groups (OpenRLHF#1322)", world=BUFFER_DIES)
def cursor_ahead() -> Patches:
    save = GroupLedger.save_cursor

    def ahead(self: Any, epoch: int, position: int) -> None:
        save(self, epoch, position + 1)  # of a prompt that was fetched beforehand

    return [(GroupLedger, "save_cursor", ahead)]
