"""A BufferActor without a loop: each message goes straight into `receive`, as a turn of its own, on
a clock of its own.

What it tells others, what it asks the registry and what it sets timers for are lists; nothing
happens until somebody delivers it.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Coroutine, Generator
from typing import Any

from tests.helpers.actors import make_system
from tests.helpers.refs import RecordedDirectory

from ratchet.actors.buffer import BufferActor
from ratchet.config import Config
from ratchet.messages import DescribeLineage, LineageDescribed, Message, PromptsClaimed
from ratchet.observability.own_calls import OwnCalls
from ratchet.storage.ledger import GroupLedger
from ratchet.types import Assignment, Prompt, RoleInfo, VersionRecord

LIFE = "b1"
"""incarnation of the buffer"""


class Question:
    """An ask that waits for its answer."""

    def __init__(self, message: DescribeLineage, actor: DrivenBuffer) -> None:
        self.message = message
        self._actor = actor
        self._coro: Coroutine[Any, Any, Any] | None = None

    def __await__(self) -> Generator[Any, LineageDescribed, LineageDescribed]:
        return (yield self)

    def of(self, coro: Coroutine[Any, Any, Any]) -> Question:
        self._coro = coro
        return self

    def answer(self, records: tuple[VersionRecord, ...]) -> None:
        assert self._coro is not None
        try:
            self._coro.send(LineageDescribed(records))
        except StopIteration:
            return
        raise AssertionError("it waits for something else")

    def close(self) -> None:
        if self._coro is not None:
            self._coro.close()


class _Itself:
    """What the actor tells itself from a child task arrives at once."""

    def __init__(self, actor: DrivenBuffer) -> None:
        self._actor = actor

    def tell(self, message: Any) -> None:
        self._actor.receive(message)


class DrivenBuffer(BufferActor):
    """`receive` it; then look at `told`, `questions` and `timers`."""

    def __init__(
        self,
        config: Config,
        num_prompts: int,
        loop: asyncio.AbstractEventLoop,
        ledger: GroupLedger | None = None,
        own_calls: OwnCalls | None = None,
    ) -> None:
        self.clock = 0.0
        self.timers: list[tuple[float, int, Message]] = []
        self.questions: list[Question] = []
        self.others = RecordedDirectory()
        self.ledger = ledger or GroupLedger.open(None)
        self._numbers = itertools.count()
        super().__init__(
            make_system(remote=self.others, loop=loop, log=_NoLog()),
            RoleInfo("buffer", "buffer", LIFE),
            config=config,
            prompts=[Prompt(f"p{i}", f"{i}>") for i in range(num_prompts)],
            ledger=self.ledger,
            own_calls=own_calls,
        )
        self._actor_ref = _Itself(self)  # type: ignore[assignment]

    def receive(self, message: Any) -> None:
        super().receive(message)
        self.end_turn()

    def now(self) -> float:
        return self.clock

    def after(self, delay_s: float, message: Any) -> Any:
        heapq.heappush(self.timers, (self.clock + delay_s, next(self._numbers), message))

    def spawn(self, coro: Coroutine[Any, Any, Any], *, name: str) -> Any:
        question: Question = coro.send(None)
        self.questions.append(question.of(coro))

    async def ask(self, ref: Any, message: Any, *, timeout: float | None = None) -> Any:
        return await Question(message, self)

    def fire(self, until: float) -> Message | None:
        """Deliver the next timer that is due by then, at its time; return what it said."""
        if not self.timers or self.timers[0][0] > until:
            self.clock = until
            return None
        self.clock, _, message = heapq.heappop(self.timers)
        self.receive(message)  # type: ignore[arg-type]
        return message

    def take_told(self) -> list[tuple[str, Message]]:
        """Return (to whom, what) since the last call; each one's in its order."""
        told = [(name, m) for name, ref in self.others.refs.items() for m in ref.told]
        for ref in self.others.refs.values():
            ref.told.clear()
        return told

    def end(self) -> None:
        for question in self.questions:
            question.close()
        self.ledger.close()


def assignments(told: list[tuple[str, Message]]) -> list[tuple[str, str, Assignment]]:
    """Return (worker, incarnation, assignment) of what was told."""
    return [
        (name, message.incarnation, assignment)
        for name, message in told
        if isinstance(message, PromptsClaimed)
        for assignment in message.assignments
    ]


class _NoLog:
    def debug(self, event: str, **fields: Any) -> None: ...

    info = warning = error = debug
