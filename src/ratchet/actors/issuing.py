"""Which prompt goes to which worker, and when: credit, room and leases in one place.

Consumes claims of workers, the versions and steps that the buffer hears of, and the group table;
produces the prompts to hand out now. Waits for nothing. What makes room: see `admission`. For a
bounded admission it must know where the next batch will be trained, and every version in between:
`unknown` names those that the registry must be asked for, and until then there is no room for
workers that hold them, and no batch past groups that began with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from ratchet.actors.admission import Admission
from ratchet.actors.credits import Credits
from ratchet.actors.entry import Entry
from ratchet.actors.group_table import GroupTable
from ratchet.config import Config
from ratchet.messages import ClaimPrompts
from ratchet.staleness import Lineage, Position
from ratchet.types import Assignment, PolicyVersion, Term, VersionRecord

Worker: TypeAlias = tuple[str, str]
"""name and incarnation"""


class Issuing:
    """The side of the buffer that gives prompts out."""

    def __init__(self, config: Config, table: GroupTable, lineage: Lineage) -> None:
        self.credits = Credits()
        self._admission = Admission(config.buffer, synchronous=config.trainer.synchronous)
        self._table = table
        self._lineage = lineage
        self._group_size = config.rollout.group_size
        self._lease_s = config.buffer.lease_s
        self._term: Term = 0
        self._next: Position | None = None
        """where the next batch is trained, with what is out counted as trained"""

    def claim(self, message: ClaimPrompts) -> bool:
        """Take the credit of a worker; return whether it is the first of this incarnation."""
        version = message.version if self._admission.is_bounded else 0  # else served all alike
        return self.credits.grant(message.worker, message.incarnation, message.credit, version)

    def trains_next(self, term: Term, position: Position) -> None:
        """Take a trainer's word for where it stands; after a rejected step that is further back."""
        self._term, self._next = term, position

    def published(self, record: VersionRecord) -> None:
        """A version is live: its trainer stands there at least. How far past it an earlier life of
        the buffer has let it train is only known when it asks.
        """
        if self._table.goes_on and not self._term:
            return
        position = Position(record.version, record.step)
        if record.state == "live" and (
            self._next is None or (record.term, record.step) >= (self._term, self._next.step)
        ):
            self._term, self._next = record.term, position

    @property
    def unknown(self) -> tuple[PolicyVersion, ...]:
        """Versions that must be known here before there can be room."""
        if not self._admission.is_bounded or self._next is None:
            return ()
        return self._lineage.unknown(
            (self._next.version, *self._table.in_flight.bases, *self.credits.versions)
        )

    def room(self, version: PolicyVersion = 0) -> int:
        """Return how many groups may be issued now to workers that hold a version."""
        groups = self._table.promised
        if not self._admission.is_bounded:
            return self._admission.room(groups)
        if self._next is None or self._lineage.unknown((self._next.version, version)):
            return 0
        return self._admission.room(groups, self._lineage.staleness(version, self._next))

    @property
    def places(self) -> int:
        """How many stored groups the queue has room for."""
        return self._admission.room(self._table.open_groups)

    @property
    def withheld(self) -> int:
        """Groups that would be issued if their workers held the newest version."""
        most = max(map(self.room, self.credits.versions), default=None)
        return 0 if most is None else self._admission.room(self._table.promised) - most

    def issue(self, now: float) -> Iterator[tuple[Worker, Assignment]]:
        """Put prompts under leases while there is room, the newest weights first."""
        for version in self.credits.versions:
            for _ in range(self.room(version)):
                worker = self.credits.take(version)
                if worker is None:
                    break
                entry = self._table.claim(worker, until=now + self._lease_s, base=version)
                yield worker, self._assignment(entry)

    def _assignment(self, entry: Entry) -> Assignment:
        return Assignment(
            entry.group_id,
            entry.attempt,
            entry.epoch,
            entry.prompt,
            self._group_size,
            self._lease_s,
        )
