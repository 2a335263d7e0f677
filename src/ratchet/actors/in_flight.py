"""The groups in flight: who holds them, until when, and what they may begin with.

Pure: consumes the claims and the ends of the group table, produces whose lease is over; waits for
nothing. To begin, to end and to find a lease cost the same however many there are.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

from ratchet.actors.entry import Entry
from ratchet.types import PolicyVersion


class InFlight:
    """One lease per group in flight."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}  # in the order of their leases' ends
        self._held: dict[tuple[str, str], dict[int, Entry]] = {}  # by worker
        self._bases: Counter[PolicyVersion] = Counter()  # by what they begin with

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry: Entry) -> bool:
        return entry.group_id in self._entries

    @property
    def bases(self) -> Mapping[PolicyVersion, int]:
        """The versions that groups in flight may begin with, and how many groups each."""
        return self._bases

    def begin(self, entry: Entry, worker: tuple[str, str], now: float, until: float) -> None:
        """Give a group to (name, incarnation), until the end of its lease; `entry.base` is set."""
        entry.worker, entry.incarnation = worker
        entry.claimed_at = now
        entry.lease_end = until
        self._bases[entry.base] += 1
        self._entries[entry.group_id] = entry
        self._held.setdefault(worker, {})[entry.group_id] = entry

    def end(self, entry: Entry) -> None:
        """Take a group out of flight; where it comes to is the caller's."""
        del self._entries[entry.group_id]
        self._bases[entry.base] -= 1
        if not self._bases[entry.base]:
            del self._bases[entry.base]
        worker = entry.worker, entry.incarnation
        held = self._held[worker]
        del held[entry.group_id]
        if not held:
            del self._held[worker]

    def find(self, worker: str, incarnation: str, group_id: int, attempt: int) -> Entry | None:
        """Return the group if exactly this try of it is in flight at exactly this worker."""
        entry = self._entries.get(group_id)
        if entry is None:
            return None
        held = (entry.worker, entry.incarnation, entry.attempt)
        return entry if held == (worker, incarnation, attempt) else None

    def held_by(self, worker: str, incarnation: str) -> list[Entry]:
        """Return what a worker has in flight."""
        return list(self._held.get((worker, incarnation), {}).values())

    def overdue(self, now: float) -> list[Entry]:
        """Return the groups whose lease has ended."""
        oldest_first = self._entries.values()
        return list(itertools.takewhile(lambda entry: entry.lease_end <= now, oldest_first))

    def next_end(self) -> float | None:
        """Return when the oldest lease ends."""
        return next((entry.lease_end for entry in self._entries.values()), None)
