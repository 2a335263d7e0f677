"""A new trainer at the buffer: what its weights have not been trained on is issued again.

Consumes the first request of each term, once the lineage of its weights is known; changes the group
table. Waits for nothing.

A trainer of a new term stands where its checkpoint stood. Every group that an earlier term trained
on a step past that, or on a branch that the new weights do not descend from, has left no trace in
them: it goes back to the queue if its payload is kept, else its prompt to those that wait. A batch
that an earlier life of the buffer has handed out is settled by the account in that request, if it
has one; else it was not trained either.
"""

from __future__ import annotations

from ratchet.actors.group_table import GroupTable
from ratchet.messages import RequestBatch
from ratchet.observability.logs import Log
from ratchet.staleness import Lineage
from ratchet.types import PolicyVersion, Term


class Recovery:
    """Settles each term once, before its first batch."""

    def __init__(self, table: GroupTable, lineage: Lineage, log: Log) -> None:
        self._table = table
        self._lineage = lineage
        self._log = log
        self._settled: Term = 0

    @property
    def is_settled(self) -> bool:
        """A trainer has said in this life of the buffer where it stands."""
        return self._settled > 0

    def settle(self, request: RequestBatch) -> None:
        """Take back what the trainer that asks has not been trained on."""
        if request.term <= self._settled:
            return
        self._settled = request.term
        path = tuple(self._lineage.path(request.version))
        self._settle_batch(request, path)
        kept = frozenset(path)
        self._table.stored.restarted(request.step)
        for version, step in self._table.trained_steps():
            if step > request.step or version not in kept:
                num_groups = self._table.lose(version, step)
                self._log.warning("step_lost", step=step, version=version, num_groups=num_groups)

    def _settle_batch(self, request: RequestBatch, path: tuple[PolicyVersion, ...]) -> None:
        entries = {entry.group_id: entry for entry in self._table.batched()}
        done = request.done
        if done is not None and entries and entries.keys() == {*done.trained, *done.rejected}:
            took_it = next(v for v in path if self._lineage.step(v) < done.step)
            self._table.train(done.trained, done.step, took_it)
            for group_id, reason in done.rejected.items():
                self._table.reissue(entries[group_id], reason)
            return
        for entry in entries.values():
            self._table.reissue(entry, "trainer_died")
