"""The batches of the model of the buffer: who has asked for one, and what it must be."""

from __future__ import annotations

import itertools

from tests.helpers.buffer_model_groups import GroupsModel

from ratchet.messages import BatchReady, RequestBatch, StepTrained
from ratchet.staleness import Position


class BatchesModel(GroupsModel):
    """Requests, and the batch that each of them gets."""

    def _take(self, message: RequestBatch) -> BatchReady | None:
        if message.term < self.term:
            return None
        self.term = message.term
        if message.done is not None:
            self._trained(message.done)
        if self.handed is not None:
            before, ids = self.handed
            if (message.term, message.step) == (before.term, before.step):
                return self.again
            self.handed = None
            self._give_up(ids, "trainer_died")
        self.request = message
        self.next = message.term, Position(message.version, message.step)
        if self.knows(message.version):
            self._judge_all(self.next[1])
        return None

    def _trained(self, message: StepTrained) -> None:
        if self.handed is None:
            return
        request, ids = self.handed
        if request.term != message.term or {*ids} != {*message.trained, *message.rejected}:
            return
        if message.attempts != {i: self.groups[i].attempt for i in ids}:
            return
        self.handed = None
        for group_id in message.trained:
            group = self.groups[group_id]
            group.place, group.trained = "trained", (request.version, message.step)
        for group_id, reason in message.rejected.items():
            group = self.groups[group_id]
            if reason.startswith("filter:"):
                self._drop(group_id, group, reason)
            else:
                self._unused(group_id, group, reason, left=False)

    def _serve(self, batches: list[BatchReady]) -> None:
        request = self.request
        size = self.config.batch_groups
        if request is None or not self.knows(request.version):
            assert not batches, "nobody has asked for a batch"
            return
        if request.term > self.settled:
            self.settled = request.term
            self._lose(request)
        position = Position(request.version, request.step)
        if len(self.queue) >= size:
            self._judge_all(position)
        ids = self._batch(position)
        if ids is None:
            assert not batches, "there is no batch that is fresh, and leaves none that will not be"
            return
        (ready,) = batches
        assert [g.group_id for g in ready.batch.groups] == ids, "first in, first out by finish"
        self.queue = [i for i in self.queue if i not in ids]
        assert (ready.term, ready.batch.step) == (request.term, request.step + 1)
        for given, age in zip(ready.batch.groups, ready.stats.staleness, strict=True):
            group = self.groups[given.group_id]
            group.place = "batched"
            assert given.attempt == group.attempt
            assert len(given.rollouts) == self.group_size, "a group is torn"
            ages = self._ages(given, position)
            assert age <= self.config.max_staleness
            assert group.reason is not None or (given == group.group and age == max(ages.values()))
        bytes_left = sum(self.groups[i].num_bytes for i in self.queue)
        assert (ready.stats.queue_groups, ready.stats.queue_bytes) == (len(self.queue), bytes_left)
        self.request, self.again = None, ready
        self.handed = request, ids
        self.next = request.term, Position(request.version, request.step + 1)

    def _batch(self, position: Position) -> list[int] | None:
        """The first to finish; if bounded, of those batches after which all that is open can still
        be trained in time.
        """
        size, bound = self.config.batch_groups, self.config.max_staleness
        if len(self.queue) < size:
            return None
        if not self.is_bounded:
            return self.queue[:size]
        flight = {i: g.base for i, g in self.groups.items() if g.place == "flight"}
        if not self.knows(*flight.values()):
            return None
        ages = {i: self._distance(base, position) for i, base in flight.items()}
        ages = {i: age for i, age in ages.items() if age <= bound}  # else it is lost already
        for i in self.queue:
            group = self.groups[i].group
            assert group is not None
            ages[i] = min(bound, max(self._ages(group, position).values()))
        for ids in itertools.combinations(self.queue, size):
            left = [ages[i] for i in ages if i not in ids]
            if all(
                sum(each >= age for each in left) <= size * (bound - age)
                or all(ages[i] >= age for i in ids)  # more cannot be done
                for age in range(bound + 1)
            ):
                return list(ids)
        return None

    def _lose(self, request: RequestBatch) -> None:
        path = [r.version for r in self._path(request.version)]
        lost = [
            group_id
            for group_id, group in self.groups.items()
            if group.place == "trained"
            and group.trained is not None
            and (group.trained[1] > request.step or group.trained[0] not in path)
        ]
        for group_id in lost:
            self.groups[group_id].reissues = 0
            self.groups[group_id].trained = None
        self._to_wait(lost, "step_lost")
