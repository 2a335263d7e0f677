"""The groups that are issued already and in nobody's hands: they come before every new prompt.

Consumes what is given up, produces the next group for a worker, or for the queue if its result is
stored (`stored_groups`). Waits for nothing.
"""

from __future__ import annotations

from collections import deque

from ratchet.actors.entry import Entry
from ratchet.actors.stored_groups import StoredGroups
from ratchet.types import RolloutGroup


class Waiting:
    """First in, first out, for the workers and for the queue apart."""

    def __init__(self, stored: StoredGroups) -> None:
        self._stored = stored
        self._entries: deque[Entry] = deque()

    def __len__(self) -> int:
        """Return how many wait for a worker."""
        return len(self._entries)

    def add(self, entry: Entry, reason: str) -> None:
        """Let a group wait that was given up for a reason: with its result, if that is good."""
        if not self._stored.recall(entry, reason):
            self._entries.append(entry)

    def add_for_worker(self, entry: Entry) -> None:
        """Let a group wait whose result cannot be judged."""
        self._entries.append(entry)

    def next(self) -> Entry | None:
        """Take the next one for a worker: its result must not be used any more."""
        if not self._entries:
            return None
        entry = self._entries.popleft()
        self._stored.forget([entry.group_id])
        return entry

    def next_stored(self) -> tuple[Entry, RolloutGroup] | None:
        """Take what was stored for longest, to be queued; what cannot be read goes to a worker."""
        while self._stored:
            entry, group = self._stored.next()
            if group is not None:
                return entry, group
            self._entries.append(entry)
        return None
