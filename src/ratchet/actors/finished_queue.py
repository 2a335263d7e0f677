"""The finished groups: first in, first out, and found by what decides how stale they are.

Pure: consumes entries of the group table, produces them in the order of their finish, or by the
versions that made them; waits for nothing. The staleness of a group is that of its versions, and
few sets of versions make all groups of a queue: to find what a new version makes stale, one group
of each set is judged, however many have finished. To put, to take and to find the oldest cost the
same at any length.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ratchet.actors.admission import payload_bytes
from ratchet.types import PolicyVersion, RolloutGroup

if TYPE_CHECKING:
    from ratchet.actors.entry import Entry


class FinishedQueue:
    """What has finished and is not batched."""

    def __init__(self) -> None:
        # not a dict: its head would be searched for past all that was taken from there
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._alike: dict[tuple[PolicyVersion, ...], dict[int, Entry]] = {}
        self.num_bytes = 0
        """Payload of all of them, as they came in."""
        self.largest_bytes = 0
        """Payload of the largest that ever came in."""
        self.groups: Mapping[int, RolloutGroup] = _Groups(self._entries)
        """Read only: id -> group, oldest finish first."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __contains__(self, entry: Entry) -> bool:
        return entry.group_id in self._entries

    def __getitem__(self, group_id: int) -> Entry:
        return self._entries[group_id]

    def put(self, entry: Entry, group: RolloutGroup) -> None:
        """Append an entry, which holds this group."""
        entry.num_bytes = payload_bytes(group)
        self._entries[entry.group_id] = entry
        self._alike.setdefault(entry.versions, {})[entry.group_id] = entry
        self.num_bytes += entry.num_bytes
        self.largest_bytes = max(self.largest_bytes, entry.num_bytes)

    def take(self, group_id: int) -> Entry:
        """Remove an entry, from wherever it stands.

        Raises:
            KeyError: if it is not there.
        """
        entry = self._entries.pop(group_id)
        alike = self._alike[entry.versions]
        del alike[group_id]
        if not alike:
            del self._alike[entry.versions]
        self.num_bytes -= entry.num_bytes
        return entry

    def sets_of_versions(self) -> list[tuple[PolicyVersion, ...]]:
        """Return each set of versions that has made a group here, once."""
        return list(self._alike)

    def num_made_by(self, versions: tuple[PolicyVersion, ...]) -> int:
        """Return how many entries are of exactly these versions."""
        return len(self._alike.get(versions, ()))

    def made_by(self, versions: tuple[PolicyVersion, ...]) -> list[Entry]:
        """Return the entries of exactly these versions, oldest finish first."""
        return list(self._alike.get(versions, {}).values())


class _Groups(Mapping[int, RolloutGroup]):
    """The groups of entries that hold one, without a way to change them."""

    def __init__(self, entries: Mapping[int, Entry]) -> None:
        self._entries = entries

    def __getitem__(self, group_id: int) -> RolloutGroup:
        group = self._entries[group_id].group
        if group is None:
            raise KeyError(group_id)
        return group

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
