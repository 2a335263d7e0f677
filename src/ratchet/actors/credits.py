"""Credits: how many prompt groups each rollout worker may still be handed.

Pure: consumes running totals from `ClaimPrompts`, produces the worker to serve next; waits for
nothing. A total is safe to repeat, to lose and to reorder: the highest one of an incarnation
counts, a new incarnation starts again from nothing, and one that has left gets nothing any more.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass


@dataclass(slots=True)
class _Account:
    incarnation: str
    number: int
    granted: int = 0
    used: int = 0
    lapsed: int = 0
    """groups whose lease has ended, and which have not come to an end there"""

    @property
    def free(self) -> int:
        return self.granted - self.used


class Credits:
    """One account per worker; to serve one costs the logarithm of their number."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._closed: set[tuple[str, str]] = set()
        self._numbers = itertools.count()
        # (-free, number, worker) of every account with some left, and what was true once
        self._heap: list[tuple[int, int, str]] = []

    @property
    def num_free(self) -> int:
        """Groups that all workers together would take now."""
        return sum(max(0, account.free) for account in self._accounts.values())

    def grant(self, worker: str, incarnation: str, total: int) -> None:
        """Take the running total of an incarnation, unless it has left: its last words may come
        after the news of its end.
        """
        if (worker, incarnation) in self._closed:
            return
        account = self._accounts.get(worker)
        if account is None or account.incarnation != incarnation:
            account = self._accounts[worker] = _Account(incarnation, next(self._numbers))
        if total > account.granted:
            account.granted = total
            self._queue(worker, account)

    def lapse(self, worker: str, incarnation: str) -> None:
        """Give the credit of a group back whose lease has ended: it may never have arrived."""
        account = self._of(worker, incarnation)
        if account is not None:
            account.used -= 1
            account.lapsed += 1
            self._queue(worker, account)

    def late(self, worker: str, incarnation: str) -> None:
        """Such a group has come to its end after all, and its worker counts it as well."""
        account = self._of(worker, incarnation)
        if account is not None and account.lapsed:
            account.used += 1
            account.lapsed -= 1
            self._queue(worker, account)

    def _of(self, worker: str, incarnation: str) -> _Account | None:
        account = self._accounts.get(worker)
        return account if account is not None and account.incarnation == incarnation else None

    def close(self, worker: str, incarnation: str) -> None:
        """Forget a worker that has left, unless a newer incarnation is there."""
        self._closed.add((worker, incarnation))
        account = self._accounts.get(worker)
        if account is not None and account.incarnation == incarnation:
            del self._accounts[worker]

    def take(self) -> tuple[str, str] | None:
        """Use one credit of the worker that has the most left; return (worker, incarnation)."""
        while self._heap:
            entry = self._heap[0]
            worker = entry[2]
            account = self._accounts.get(worker)
            if account is None or entry != (-account.free, account.number, worker):
                heapq.heappop(self._heap)
                continue
            account.used += 1
            if account.free > 0:
                heapq.heapreplace(self._heap, (-account.free, account.number, worker))
            else:
                heapq.heappop(self._heap)
            return worker, account.incarnation
        return None

    def _queue(self, worker: str, account: _Account) -> None:
        if account.free > 0:
            heapq.heappush(self._heap, (-account.free, account.number, worker))
        if len(self._heap) > 2 * len(self._accounts) + 16:
            self._heap = [
                (-each.free, each.number, name)
                for name, each in self._accounts.items()
                if each.free > 0
            ]
            heapq.heapify(self._heap)
