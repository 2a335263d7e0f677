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

from collections.abc import Callable, Collection

from ratchet.actors.entry import Entry
from ratchet.actors.group_table import GroupTable
from ratchet.messages import RequestBatch, StepTrained
from ratchet.observability.logs import Log
from ratchet.staleness import Lineage
from ratchet.types import PolicyVersion, Term


class Recovery:
    """Settles each term once, before its first batch.

    Args:
        table: of the groups.
        lineage: of the weights.
        reject: judges a group, by id, that a step did not use, for a reason.
        log: where it is said what was lost.
    """

    def __init__(
        self,
        table: GroupTable,
        lineage: Lineage,
        reject: Callable[[int, str], None],
        log: Log,
    ) -> None:
        self._table = table
        self._lineage = lineage
        self._reject = reject
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

    def account(self, done: StepTrained, newest: PolicyVersion) -> bool:
        """Take the account of a batch that an earlier life of the buffer has handed out, before the
        trainer asks for another; `newest` is of its line. False if it is of another batch.
        """
        if newest < 0 or self._lineage.unknown((newest,)):
            return False
        return self._take(done, tuple(self._lineage.path(newest)))

    def _settle_batch(self, request: RequestBatch, path: tuple[PolicyVersion, ...]) -> None:
        """Whoever asks for a batch does not have the one that is out: it has either accounted for
        it, or it will not take it any more.
        """
        if request.done is None or not self._take(request.done, path):
            for entry in self._table.batched():
                self._table.reissue(entry, "trainer_died")

    def _take(self, done: StepTrained, path: tuple[PolicyVersion, ...]) -> bool:
        entries = {entry.group_id: entry for entry in self._table.batched()}
        took_it = next((v for v in path if self._lineage.step(v) < done.step), None)
        if took_it is None or not accounts_for(done, entries.values()):
            return False
        self._table.train(done.trained, done.step, took_it)
        for group_id, reason in done.rejected.items():
            entry = entries[group_id]
            entry.group = self._table.stored.read(entry)  # for a handler of the user's own
            self._reject(group_id, reason)
        return True


def accounts_for(done: StepTrained, batched: Collection[Entry]) -> bool:
    """Whether this says what became of these groups, at these attempts and no earlier ones."""
    ids = {entry.group_id for entry in batched}
    attempts = done.attempts
    return (
        bool(ids)
        and {*done.trained, *done.rejected} == ids
        and all(attempts.get(entry.group_id, entry.attempt) == entry.attempt for entry in batched)
    )
