"""What becomes of a group when its worker is done with it, is too late, or has left.

Consumes finishes and failures of workers, the clock, and who has left; changes the group table, and
tells the policy of what stays. Waits for nothing: a finish with a token of a version that is not
known here is parked, and whoever calls is told which versions the registry must be asked for. One
whose lease is over, or that another worker has now, is late: counted, and ignored.
"""

from __future__ import annotations

from ratchet.actors.buffer_parts import BufferParts
from ratchet.actors.entry import Entry
from ratchet.config import BufferConfig
from ratchet.messages import GroupFailed, GroupFinished
from ratchet.types import PolicyVersion, RoleInfo


class Finishing:
    """The side of the buffer that takes groups in."""

    def __init__(self, config: BufferConfig, parts: BufferParts) -> None:
        self._lease_s = config.lease_s
        self._table = parts.table
        self._known = parts.known
        self._judging = parts.judging
        self._issuing = parts.issuing
        self._counts = parts.counts
        self._policy = parts.policy
        self._log = parts.log

    def finish(self, message: GroupFinished) -> tuple[PolicyVersion, ...]:
        """Take a group in; or park it, and return the versions without which it is not judged."""
        group = message.group
        self._counts.heard(message.stats)
        entry = self._claimed(message.worker, message.incarnation, group.group_id, group.attempt)
        if entry is None:
            return ()
        versions = group.versions
        if unknown := self._known.lineage.unknown(versions):
            self._known.park(message)
        elif self._judging.finish(entry, group, versions) and entry.group is not None:
            self._policy.put(entry.group)
        return unknown

    def fail(self, message: GroupFailed) -> None:
        """Judge a group that has no rollouts."""
        self._counts.heard(message.stats)
        entry = self._claimed(
            message.worker, message.incarnation, message.group_id, message.attempt
        )
        if entry is not None:
            self._judging.fail(entry, message)

    def end_leases(self, now: float) -> None:
        """Issue the groups again whose lease has ended."""
        for entry in self._table.in_flight.overdue(now):
            self._log.warning(
                "lease_expired",
                group=entry.group_id,
                attempt=entry.attempt,
                worker=entry.worker,
                lease_s=self._lease_s,
            )
            self._issuing.credits.lapse(
                entry.worker, entry.incarnation, entry.group_id, entry.attempt
            )
            self._table.reissue(entry, "lease_expired")

    def left(self, role: RoleInfo) -> None:
        """Issue the groups again that a worker has taken with it."""
        for entry in self._table.in_flight.held_by(role.name, role.incarnation):
            self._log.warning("lease_ended", group=entry.group_id, worker=role.name)
            self._table.reissue(entry, "worker_died")

    def _claimed(self, worker: str, incarnation: str, group_id: int, attempt: int) -> Entry | None:
        entry = self._table.in_flight.find(worker, incarnation, group_id, attempt)
        if entry is None:
            self._log.warning("late_finish", group=group_id, attempt=attempt, worker=worker)
            self._issuing.credits.late(worker, incarnation, group_id, attempt)
        return entry
