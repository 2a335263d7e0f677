"""What the trainer and the buffer owe each other: one batch a step, and the account of the last.

Consumes the position of the weights in hand and the buffer's answers; produces `RequestBatch` and
`StepTrained`. A request waits for its batch, and is said again every `repeat_s` while it does, as a
link may lose either of them; what unblocks it is the batch that is due, or `end`. Who waits for it
sets the deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from ratchet.actors.publisher import Publisher
from ratchet.messages import BatchReady, Message, RequestBatch, StepTrained
from ratchet.observability.logs import Log
from ratchet.transport.mailbox.base import Ref


class RepeatRequest(Message, frozen=True):
    """To the trainer itself: a batch is still waited for, and the request for it may be lost."""


class BatchRequests:
    """The requests of one trainer, one at a time."""

    def __init__(
        self,
        trainer: str,
        *,
        publisher: Publisher,
        buffer: Callable[[], Ref],
        life: Callable[[], str],
        after: Callable[[float, RepeatRequest], asyncio.TimerHandle],
        repeat_s: float,
        log: Log,
    ) -> None:
        self._trainer = trainer
        self._publisher = publisher
        self._buffer = buffer
        self._life = life
        self._asked = ""  # the life of the buffer that was asked last
        self._accounted = False  # `done` is of the last batch that this trainer took
        self._after = after
        self._repeat_s = repeat_s
        self._log = log
        self._batch: asyncio.Future[BatchReady | None] | None = None
        self._repeat: asyncio.TimerHandle | None = None
        self.done: StepTrained | None = None
        """What became of the last batch, or of that of the checkpoint."""
        self._taken: tuple[tuple[int, int], ...] = ()  # (group, attempt) of the last batch

    @property
    def waiting(self) -> bool:
        """Whether a batch was asked for, and has not come."""
        return self._batch is not None and not self._batch.done()

    async def next(self) -> BatchReady | None:
        """Ask for a batch for exactly the weights in hand; None if `end` came first."""
        self._batch = asyncio.get_running_loop().create_future()
        self._request()
        try:
            return await self._batch
        finally:
            if self._repeat is not None:
                self._repeat.cancel()

    def repeat(self) -> None:
        """Ask again, if the batch has not come; else say again what became of the last one."""
        if self.waiting:
            self._request()
        elif self._accounted and self.done is not None:
            self._buffer().tell(self.done)

    def ready(self, message: BatchReady) -> None:
        """End the wait for a batch, if it is the batch of the step in hand and not an older one.

        A step that was not finite is taken again under its number: then the groups tell. A batch of
        a life of the buffer before the one that was asked last is not due: that one takes the
        request for the word that it never came.
        """
        term, step = message.term, message.batch.step
        due = (self._publisher.term, self._publisher.position.step + 1) if self.waiting else None
        is_asked = message.buffer == self._asked
        if is_asked and (term, step) == due and _attempts(message) != self._taken:
            self._taken, self._accounted = _attempts(message), False
            self.end(message)
        else:
            self._log.warning("batch_not_due", term=term, step=step, due=due, asked=is_asked)

    def end(self, ready: BatchReady | None = None) -> None:
        """End the wait."""
        if self._batch is not None and not self._batch.done():
            self._batch.set_result(ready)

    def account(self, done: StepTrained) -> None:
        """Tell what became of the batch; the next request says it once more."""
        self.done = msgspec.structs.replace(done, attempts=dict(self._taken))
        self._accounted = True
        self._buffer().tell(self.done)

    def _request(self) -> None:
        self._repeat = self._after(self._repeat_s, RepeatRequest())
        life = self._life()
        if not life:
            return  # it is said when a buffer is there
        self._asked = life
        version, step = self._publisher.position
        term = self._publisher.term
        self._buffer().tell(RequestBatch(self._trainer, term, version, step, self.done, life))


def _attempts(ready: BatchReady) -> tuple[tuple[int, int], ...]:
    return tuple((group.group_id, group.attempt) for group in ready.batch.groups)
