"""Models of other systems' buffers, for the benchmark of policies: who may begin a group, and which
groups a batch takes. They speak the messages of ours, so that the same workers, engines and trainer
are around them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from ratchet.actors.credits import Credits
from ratchet.messages import (
    BatchReady,
    ClaimPrompts,
    GroupFinished,
    Message,
    PromptsClaimed,
    RequestBatch,
    StepTrained,
    VersionUpdated,
)
from ratchet.transport.mailbox.base import Ref
from ratchet.types import Assignment, Batch, Prompt, RolloutGroup


class OtherBuffer:
    """Hands out groups while there is credit and `room`, and batches as soon as one is complete."""

    name = "buffer"

    def __init__(self, batch_groups: int, bound: int, group_size: int) -> None:
        self.batch_groups, self.bound = batch_groups, bound
        self.version = 0
        self.num_begun = 0
        self.running: dict[int, Assignment] = {}
        self.finished: dict[int, RolloutGroup] = {}
        """that no batch has taken, oldest finish first"""
        self._group_size = group_size
        self._credits = Credits()
        self._request: RequestBatch | None = None
        self.find: Any = None

    def room(self) -> int:
        raise NotImplementedError

    def take(self) -> list[RolloutGroup]:
        """Return a whole batch, or nothing."""
        raise NotImplementedError

    def finish(self, group: RolloutGroup) -> None:
        self.finished[group.group_id] = group

    def tell(self, message: Message) -> None:
        asyncio.get_running_loop().call_soon(self._handle, message)

    def watch(self, watcher: object) -> None:
        """Nothing dies here."""

    def _handle(self, message: Message) -> None:
        match message:
            case ClaimPrompts():
                self._credits.grant(message.worker, message.incarnation, message.credit)
            case GroupFinished():
                del self.running[message.group.group_id]
                self.finish(message.group)
            case RequestBatch():
                self._request = message
            case VersionUpdated():
                self.version = message.record.version
            case StepTrained():
                pass
            case _:
                raise AssertionError(message)
        self._serve()
        while self.room() > 0 and (worker := self._credits.take()) is not None:
            self._begin(*worker)

    def _begin(self, worker: str, incarnation: str) -> None:
        group_id, self.num_begun = self.num_begun, self.num_begun + 1
        prompt = Prompt(f"p{group_id}", "p")
        assignment = Assignment(group_id, 0, 0, prompt, self._group_size, 1e9)
        self.running[group_id] = assignment
        worker_ref: Ref = self.find(worker)
        worker_ref.tell(PromptsClaimed(incarnation, (assignment,), "1"))

    def _serve(self) -> None:
        if self._request is None or not (groups := self.take()):
            return
        request, self._request = self._request, None
        batch = Batch(request.step + 1, tuple(groups))
        stats: Any = None  # the trainer of a replay does not read them
        self.find(request.trainer).tell(BatchReady(request.term, batch, stats))


class Areal(OtherBuffer):
    """AReaL (arXiv:2505.24298; its StalenessManager): a rollout is begun while fewer than
    `max_concurrent_rollouts` run (here the workers' slots) and all that were ever accepted or run
    are at most (version + max_head_offpolicyness + 1) x batch. First finished, first trained;
    nothing is thrown away, however old it has become.
    """

    def room(self) -> int:
        most = (self.version + self.bound + 1) * self.batch_groups
        return most - self.num_begun

    def take(self) -> list[RolloutGroup]:
        if len(self.finished) < self.batch_groups:
            return []
        return [self.finished.pop(each) for each in list(self.finished)[: self.batch_groups]]


class WindowedFifo(OtherBuffer):
    """The windowed FIFO of MiniMax (arXiv:2605.26494, section 6.2.4) as torchtitan has it
    (experiments/rl/docs/windowed_fifo.md): groups are trained in the order of their issue, but what
    is finished in a window of W groups, which begins with the oldest that no batch has taken, may
    overtake. At most C = (S + 1) x B groups are active; a slot is free when the generators have the
    version trained on it. The oldest group is then at most floor((C + W - 2) / B) steps old: S is
    chosen as bound - 1 and W as 0.3 x C, its default, but at most B + 1, so that this is the bound.
    """

    def __init__(self, batch_groups: int, bound: int, group_size: int) -> None:
        super().__init__(batch_groups, bound, group_size)
        self._capacity = bound * batch_groups
        self._window = max(1, min(int(0.3 * self._capacity), batch_groups + 1))
        self._waiting: deque[int] = deque()
        """ids that no batch has taken, by issue"""
        self._taken: list[RolloutGroup] = []
        self._known = 0

    def room(self) -> int:
        return self._capacity + self.version * self.batch_groups - self.num_begun

    def take(self) -> list[RolloutGroup]:
        self._waiting.extend(range(self._known, self.num_begun))
        self._known = self.num_begun
        while (group := self._next()) is not None:
            self._taken.append(group)
        if len(self._taken) < self.batch_groups:
            return []
        batch = self._taken[: self.batch_groups]
        del self._taken[: self.batch_groups]
        return batch

    def _next(self) -> RolloutGroup | None:
        if not self._waiting:
            return None
        end = self._waiting[0] + self._window
        for group_id in self._waiting:
            if group_id >= end:
                return None
            if group_id in self.finished:
                self._waiting.remove(group_id)
                return self.finished.pop(group_id)
        return None
