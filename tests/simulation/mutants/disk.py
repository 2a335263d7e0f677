"""Faults of what is kept: told before it is on the disk, ahead of it, or lost with the process."""

from __future__ import annotations

from typing import Any

from tests.simulation import faults as f
from tests.simulation.mutants.base import Patches, mutant
from tests.simulation.ordinary import ordinary

from ratchet.actors.entry import Entry
from ratchet.actors.group_table import GroupTable
from ratchet.actors.recovery import Recovery
from ratchet.actors.role import BUFFER, REGISTRY
from ratchet.storage.ledger import GroupLedger
from ratchet.storage.sqlite import Database
from ratchet.storage.versions import VersionStore

REGISTRY_DIES = ordinary(f.Crash(100.0, REGISTRY, power=False))
REGISTRY_LOSES_POWER = ordinary(f.Crash(100.0, REGISTRY, power=True), seed=2)
BUFFER_DIES = ordinary(f.Crash(100.0, BUFFER, power=False))
BUFFER_COMES_BACK = ordinary(*(f.Revive(at, BUFFER, 0.1) for at in (45.0, 65.0, 85.0, 100.0)))
REGISTRY_COMES_BACK = ordinary(
    *(f.Revive(at, REGISTRY, 0.1, after=1) for at in (30.0, 50.0, 70.0, 90.0)), seed=2
)
BUFFER_COMES_BACK_AGAIN = ordinary(
    f.Sabotage(0.0, "reward", 0.7, 400.0),
    *(f.Revive(20.0 * i, BUFFER, 0.1) for i in range(1, 15)),
    buffer={"unused": "retry", "max_retries": 1, "max_reissues": 50},
)


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


@mutant("the account of a batch that a dead buffer handed out is lost", world=BUFFER_COMES_BACK)
def account_lost() -> Patches:
    return [(Recovery, "_take", lambda self, done, path: False)]


@mutant("the next registry counts on from the last live number", world=REGISTRY_COMES_BACK)
def number_reused() -> Patches:
    opened = VersionStore.open.__func__  # type: ignore[attr-defined]

    def forgetful(cls: Any, path: Any, *, run: Any = None) -> Any:
        store = opened(cls, path, run=run)
        store._sql.execute("DELETE FROM versions WHERE state != 'live'")
        return store

    return [(VersionStore, "open", classmethod(forgetful))]


@mutant("the retry budget is lost with the buffer", world=BUFFER_COMES_BACK_AGAIN)
def retry_budget_lost() -> Patches:
    def unburdened(row: Any, prompt: Any) -> Entry:
        return Entry(row.group_id, row.epoch, prompt, attempt=row.attempt)

    return [(Entry, "of", staticmethod(unburdened))]
