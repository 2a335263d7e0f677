"""The trainer's side of the buffer: a request, the batch that answers it, and what became of that.

Consumes `RequestBatch` and `StepTrained`, and the finished groups; produces `BatchReady`. Waits for
nothing: a request stays until `serve` can answer it, and `unknown` names the versions that the
registry must be asked for first. A batch goes out once per (term, step); the same request gets the
same batch again. A trainer of an older term is fenced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ratchet.actors.buffer_parts import BufferParts
from ratchet.actors.due_first import DueFirst
from ratchet.actors.entry import Entry
from ratchet.actors.recovery import Recovery, accounts_for
from ratchet.config import BufferConfig
from ratchet.messages import BatchReady, CheckpointWritten, RequestBatch, StepTrained
from ratchet.staleness import Position
from ratchet.types import Batch, PolicyVersion, Term, VersionRecord


class Batches:
    """At most one request, and one batch, at a time."""

    def __init__(self, config: BufferConfig, parts: BufferParts) -> None:
        self.term: Term = 0
        self.request: RequestBatch | None = None
        self.handed: tuple[RequestBatch, BatchReady] | None = None
        """the batch that is out"""
        self._size = config.batch_groups
        self._table = parts.table
        self._lineage = parts.known.lineage
        self._judging = parts.judging
        self._issuing = parts.issuing
        self._counts = parts.counts
        self._policy = parts.policy
        self._due_first = (
            DueFirst(config, self._table, self._lineage) if config.admission == "bounded" else None
        )
        self._log = parts.log
        self._newest: PolicyVersion = -1
        self._recovery = Recovery(self._table, self._lineage, self._judging.reject, self._log)

    @property
    def unknown(self) -> tuple[PolicyVersion, ...]:
        """Versions without which the request cannot be answered; one ancestor after the other, as
        burnt ones are not announced.
        """
        return () if self.request is None else self._lineage.unknown((self.request.version,))

    def take(self, message: RequestBatch) -> BatchReady | None:
        """Note a request; return the batch that it has had already."""
        if message.term < self.term:
            self._fence(message)
            return None
        self.term = message.term
        if message.done is not None and self._is_handed(message.done):
            self.trained(message.done)  # its own message was lost on its way
        if self.handed is not None:
            request, ready = self.handed
            if (message.term, message.step) == (request.term, request.step):
                return ready  # the first one was lost on its way
            # another trainer, or one that lost its memory: what it was handed was never trained
            for entry in self._table.batched():
                self._table.reissue(entry, "trainer_died")
            self.handed = None
        self.request = message
        position = Position(message.version, message.step)
        self._issuing.trains_next(message.term, position)
        if not self.unknown:
            self._judging.purge(position)
        return None

    def serve(self) -> tuple[RequestBatch, BatchReady] | None:
        """Answer the request if there is one, and a batch for it."""
        request = self.request
        if request is not None and not self.unknown:
            self._recovery.settle(request)
        self._requeue()
        if request is None or self.unknown:
            return None
        position = Position(request.version, request.step)
        if self._table.num_queued >= self._size:
            self._judging.purge(position)
        if self._table.num_queued < self._size:
            return None
        entries = self._chosen(position)
        if not entries:
            return None
        self._judging.note_staleness(entries, position)
        step = request.step + 1
        batch = Batch(step, self._table.batch(entries, step))
        staleness = tuple(entry.staleness for entry in entries)
        left = self._judging.queue_staleness(position)
        stats = self._counts.take(staleness, left, self._policy.metrics())
        self.request = None
        self.handed = request, BatchReady(request.term, batch, stats, request.buffer)
        self._issuing.trains_next(request.term, Position(request.version, step))
        self._requeue()  # what was handed out has made room
        return self.handed

    def heard_of(self, records: Iterable[VersionRecord]) -> None:
        """Learn who may ask: whoever has published under an older term may not, and what it has
        asked for already is not answered any more.
        """
        for record in records:
            self.term = max(self.term, record.term)
            self._newest = max(self._newest, record.version)
        if self.request is not None and self.request.term < self.term:
            self._fence(self.request)
            self.request = None

    def trained(self, message: StepTrained) -> None:
        """Take the account of the batch that is out; another one is fenced."""
        is_early = self.handed is None and message.term >= self.term
        if is_early and self._recovery.account(message, self._newest):
            return  # an earlier life of the buffer has handed it out
        if self.handed is None or not self._is_handed(message):
            self._log.warning("step_fenced", term=message.term, step=message.step)
            return
        request, _ = self.handed
        self.handed = None
        self._table.train(message.trained, message.step, request.version)
        for group_id, reason in message.rejected.items():
            self._judging.reject(group_id, reason)

    def committed(self, message: CheckpointWritten) -> None:
        """A checkpoint has what was trained up to its step."""
        if message.term < self.term:
            self._log.warning("checkpoint_fenced", term=message.term, newer=self.term)
            return
        self._table.commit(message.step)

    def _fence(self, request: RequestBatch) -> None:
        self._log.warning("request_fenced", term=request.term, newer=self.term)

    def _requeue(self) -> None:
        """Queue what is stored, while there is room; staleness is judged for the trainer's word."""
        if not self._recovery.is_settled:
            return
        while self._table.stored and self._issuing.places:
            found = self._table.waiting.next_stored()
            if found is None:
                return
            entry, group = found
            if self._lineage.unknown(group.versions):  # then its staleness is, too
                self._table.waiting.add_for_worker(entry)
            elif self._judging.requeue(entry, group) and entry.group is not None:
                self._log.info("group_requeued", group=entry.group_id, attempt=entry.attempt)
                self._policy.put(entry.group)

    def _chosen(self, position: Position) -> Sequence[Entry]:
        """Return the policy's batch; none of it while the policy waits for more."""
        queue = self._table.queue
        if self._due_first is not None:
            ids = self._due_first.choose(position)
        else:
            ids = self._policy.get(self._size, queue.groups)
        if not ids and not len(self._table.in_flight) and not self._issuing.room():
            raise self._policy.waits_for_nothing(self._size, len(queue))
        return [queue[group_id] for group_id in ids]

    def _is_handed(self, done: StepTrained) -> bool:
        """Whether this is the account of the batch that is out."""
        return (
            self.handed is not None
            and self.handed[0].term == done.term
            and accounts_for(done, self._table.batched())
        )
