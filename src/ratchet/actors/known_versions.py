"""The versions that the buffer has heard of, and the finishes that wait for the others.

Pure: consumes version records, produces what must be asked of the registry and what can be judged
now. An engine generates with a version as soon as it is loaded, so a group may come before the
event; it is parked until the registry has answered, and is under its lease all the while.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ratchet.errors import VersionError
from ratchet.messages import GroupFinished
from ratchet.staleness import Lineage
from ratchet.types import PolicyVersion, VersionRecord


class KnownVersions:
    """A lineage that knows what it does not know."""

    def __init__(self) -> None:
        self.lineage = Lineage()
        self._parked: list[GroupFinished] = []
        self._asked: set[PolicyVersion] = set()

    def learn(self, records: Iterable[VersionRecord]) -> None:
        """Add what the registry has told."""
        for record in records:
            self.lineage.add(record.version, record.step, record.parent)

    def park(self, finish: GroupFinished) -> None:
        """Keep a finish until `answered`."""
        self._parked.append(finish)

    def to_ask(self, unknown: Iterable[PolicyVersion]) -> tuple[PolicyVersion, ...]:
        """Return those that nobody has asked for yet, and note that they are asked for now."""
        new = tuple(version for version in unknown if version not in self._asked)
        self._asked.update(new)
        return new

    def answered(
        self, asked: Sequence[PolicyVersion], records: Sequence[VersionRecord]
    ) -> list[GroupFinished]:
        """Take the registry's answer; return the parked finishes, to be judged again.

        Raises:
            VersionError: if tokens carry a number that was never reserved.
        """
        self.learn(records)
        self._asked.difference_update(asked)
        never_reserved = set(asked) - {record.version for record in records}
        if never_reserved:
            msg = f"versions {sorted(never_reserved)} generated tokens but were never reserved"
            raise VersionError(msg)
        parked, self._parked = self._parked, []
        return parked
