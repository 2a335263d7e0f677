"""Credits: how many prompt groups each rollout worker may still be handed.

Pure: consumes running totals from `ClaimPrompts`, produces the worker to serve next; waits for
nothing. A total is safe to repeat, to lose and to reorder: the highest one of an incarnation
counts, a new incarnation starts again from nothing, and one that has left gets nothing any more.
The same holds of the version that a claim names: an engine never goes back. Workers of one version
are served apart from those of another, as a bounded admission may have room for the one only.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter

import msgspec

from ratchet.types import PolicyVersion


class _Account(msgspec.Struct, eq=False, gc=False):
    incarnation: str
    number: int
    version: PolicyVersion
    granted: int = 0
    used: int = 0
    lapsed: set[tuple[int, int]] = msgspec.field(default_factory=set)
    """(group, attempt) whose lease has ended, and which have not come to an end there"""

    @property
    def free(self) -> int:
        return self.granted - self.used


class Credits:
    """One account per worker; to serve one costs the logarithm of their number."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._closed: dict[tuple[str, str], _Account | None] = {}
        self._numbers = itertools.count()
        self._num_at: Counter[PolicyVersion] = Counter()  # accounts of each version
        # by version: (-free, number, worker) of each account with some left, and what was once true
        self._heaps: dict[PolicyVersion, list[tuple[int, int, str]]] = {}

    @property
    def num_free(self) -> int:
        """Groups that all workers together would take now."""
        return sum(max(0, account.free) for account in self._accounts.values())

    @property
    def versions(self) -> list[PolicyVersion]:
        """The versions that workers with some credit may hold, and others; newest first."""
        return sorted(self._heaps, reverse=True)

    def life_of(self, worker: str) -> str:
        """Return the incarnation that is served under a name; empty if none is."""
        account = self._accounts.get(worker)
        return "" if account is None else account.incarnation

    def grant(self, worker: str, incarnation: str, total: int, version: PolicyVersion = 0) -> bool:
        """Take the running total of an incarnation, and the version that it held then, unless it
        has left: its last words may come after the news of its end. Return whether it is the first.
        """
        if (worker, incarnation) in self._closed:
            return False
        account = self._accounts.get(worker)
        is_first = account is None or account.incarnation != incarnation
        if account is None or is_first:
            if account is not None:
                self._forget(worker, account)
            account = _Account(incarnation, next(self._numbers), version)
            self._accounts[worker] = account
            self._num_at[version] += 1
        elif version > account.version:
            self._leave(account.version)
            account.version = version
            self._num_at[version] += 1
        elif total <= account.granted:
            return False
        account.granted = max(account.granted, total)
        self._queue(worker, account)
        return is_first

    def lapse(self, worker: str, incarnation: str, group_id: int, attempt: int) -> None:
        """Give the credit of a group back whose lease has ended: it may never have arrived."""
        account = self._of(worker, incarnation)
        if account is not None:
            account.used -= 1
            account.lapsed.add((group_id, attempt))
            self._queue(worker, account)

    def late(self, worker: str, incarnation: str, group_id: int, attempt: int) -> None:
        """If its lease had ended, it has come to its end after all: its worker counts it too."""
        account = self._of(worker, incarnation)
        if account is not None and (group_id, attempt) in account.lapsed:
            account.used += 1
            account.lapsed.remove((group_id, attempt))
            self._queue(worker, account)

    def _of(self, worker: str, incarnation: str) -> _Account | None:
        account = self._accounts.get(worker)
        return account if account is not None and account.incarnation == incarnation else None

    def close(self, worker: str, incarnation: str) -> None:
        """Serve a worker no more that has left; a newer incarnation is another one."""
        account = self._of(worker, incarnation)
        self._closed.setdefault((worker, incarnation), account)
        if account is not None:
            self._forget(worker, account)

    def reopen(self, worker: str, incarnation: str) -> None:
        """Serve it again where it has not left after all: where it was silent, and the registry
        that gave it up has started again. What it was handed counts on, as it counts it.
        """
        account = self._closed.pop((worker, incarnation), None)
        if account is not None and worker not in self._accounts:
            self._accounts[worker] = account
            self._num_at[account.version] += 1
            self._queue(worker, account)

    def take(self, version: PolicyVersion = 0) -> tuple[str, str] | None:
        """Use one credit of the worker of a version that has the most left; return (worker,
        incarnation).
        """
        heap = self._heaps.get(version, [])
        while heap:
            entry = heap[0]
            worker = entry[2]
            account = self._accounts.get(worker)
            if (
                account is None
                or account.version != version
                or entry != (-account.free, account.number, worker)
            ):
                heapq.heappop(heap)
                continue
            account.used += 1
            if account.free > 0:
                heapq.heapreplace(heap, (-account.free, account.number, worker))
            else:
                heapq.heappop(heap)
            return worker, account.incarnation
        self._heaps.pop(version, None)
        return None

    def _forget(self, worker: str, account: _Account) -> None:
        del self._accounts[worker]
        self._leave(account.version)

    def _leave(self, version: PolicyVersion) -> None:
        self._num_at[version] -= 1
        if not self._num_at[version]:  # what is left of its heap was true once
            del self._num_at[version]
            self._heaps.pop(version, None)

    def _queue(self, worker: str, account: _Account) -> None:
        if account.free <= 0:
            return
        version = account.version
        heap = self._heaps.setdefault(version, [])
        heapq.heappush(heap, (-account.free, account.number, worker))
        if len(heap) > 2 * self._num_at[version] + 16:
            heap[:] = [
                (-each.free, each.number, name)
                for name, each in self._accounts.items()
                if each.free > 0 and each.version == version
            ]
            heapq.heapify(heap)
