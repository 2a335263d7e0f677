"""What this node waits for from others: replies to its asks, and the end of actors it watches.

Consumes answers, failures and verdicts; ends each ask once and tells each watcher once. Each wait
is unblocked by the reply, by the end of the peer, or by its deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import msgspec

from ratchet.errors import AskTimeout, RatchetError
from ratchet.messages import Down, Message
from ratchet.transport.mailbox.base import Recipient, Wait


class _Asked(msgspec.Struct, eq=False):  # built several times faster than a dataclass
    future: asyncio.Future[Message]
    receiver: str
    question: str
    since: float
    timeout_s: float

    @property
    def until(self) -> float:
        return self.since + self.timeout_s


class _Watched(NamedTuple):
    receiver: str
    watcher: Recipient


class Calls:
    """Open asks and watches of one node, by id. Ids are never used twice."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._ids = count(1)
        self._asked: dict[int, _Asked] = {}
        self._watched: dict[int, _Watched] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.num_late_replies = 0
        """replies to asks that had ended, or had their reply already"""

    def open_ask(
        self, receiver: str, question: str, timeout: float
    ) -> tuple[int, asyncio.Future[Message]]:
        """Begin an ask; its future ends within `timeout` seconds."""
        ask_id = next(self._ids)
        now = self._loop.time()
        future: asyncio.Future[Message] = self._loop.create_future()
        self._asked[ask_id] = _Asked(future, receiver, question, now, timeout)
        if self._timer is None or now + timeout < self._timer.when():
            self._set_timer(now + timeout)
        return ask_id, future

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._on_timer, at)

    def _on_timer(self, at: float) -> None:
        """End what is due at `at`. One timer serves all asks: nearly every ask has its reply long
        before, and a timer of its own would cost more than the ask.
        """
        self._timer = None
        for ask_id, asked in [(k, v) for k, v in self._asked.items() if v.until <= at]:
            text = (
                f"{self._name} asked {asked.receiver} for {asked.question}; "
                f"no reply within {asked.timeout_s:g} s"
            )
            self.fail(ask_id, AskTimeout(text))
        if self._asked:
            self._set_timer(min(asked.until for asked in self._asked.values()))

    def _close_ask(self, ask_id: int, by: str | None) -> asyncio.Future[Message] | None:
        """Return the future to be set, or None if nobody waits for it."""
        asked = self._asked.get(ask_id)
        if asked is None or by not in (None, asked.receiver):
            self.num_late_replies += 1
            return None
        del self._asked[ask_id]
        return None if asked.future.done() else asked.future

    def reply(self, ask_id: int, message: Message, *, by: str | None = None) -> None:
        """End an ask with its reply, which came from the node `by`; None is this one. A reply that
        is late, the second one, or not of the node that was asked is counted and ignored.
        """
        future = self._close_ask(ask_id, by)
        if future is not None:
            future.set_result(message)

    def fail(self, ask_id: int, error: RatchetError, *, by: str | None = None) -> None:
        """End an ask with an error; `by` as for `reply`."""
        future = self._close_ask(ask_id, by)
        if future is not None:
            future.set_exception(error)

    def watch(self, receiver: str, watcher: Recipient) -> int:
        """Begin a watch."""
        watch_id = next(self._ids)
        self._watched[watch_id] = _Watched(receiver, watcher)
        return watch_id

    def end_watch(self, watch_id: int, reason: str, *, by: str | None = None) -> None:
        """Tell the watcher, if it has not been told; `by` as for `reply`."""
        watched = self._watched.get(watch_id)
        if watched is not None and by in (None, watched.receiver):
            del self._watched[watch_id]
            watched.watcher.tell(Down(watched.receiver, reason))

    def end_all(self, receiver: str, error: RatchetError) -> None:
        """The receiver's process is gone: end every ask and every watch of it."""
        for ask_id in [key for key, asked in self._asked.items() if asked.receiver == receiver]:
            self.fail(ask_id, type(error)(str(error)))
        for watch_id in [key for key, each in self._watched.items() if each.receiver == receiver]:
            self.end_watch(watch_id, str(error))

    def waits(self) -> Iterator[Wait]:
        """Yield every open ask."""
        return (
            Wait(self._name, asked.receiver, asked.question, asked.since, asked.until)
            for asked in self._asked.values()
        )
