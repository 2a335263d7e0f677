"""What an actor sees of another actor, wherever that one lives.

`Ref` is the same for an actor in this process and for one behind a link. `current_trace` carries
the trace id and the policy version of the message in hand: set around each message from its
envelope, read by whatever sends or logs.
"""

from __future__ import annotations

from collections.abc import Awaitable
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from ratchet.messages import Ask, Message
from ratchet.types import PolicyVersion

R = TypeVar("R")


class Trace(NamedTuple):
    """Follows a message through every actor that it causes to act."""

    trace_id: str
    version: PolicyVersion | None


current_trace: ContextVar[Trace | None] = ContextVar("current_trace", default=None)


class Wait(NamedTuple):
    """One row of the table that shows who waits for whom. Times are the loop's, in seconds."""

    who: str
    on: str
    what: str
    since: float
    until: float


class Recipient(Protocol):
    """Whoever can be told something."""

    @property
    def name(self) -> str:
        """The recipient's name; survives a restart."""
        ...

    def tell(self, message: Message) -> None:
        """Send and forget. A message that cannot be handled becomes a dead letter; nothing raises
        here.
        """
        ...


class Ref(Recipient, Protocol):
    """A handle on an actor. The names and keywords are Pykka's."""

    def ask(self, message: Ask[R], *, block: Literal[False], timeout: float) -> Awaitable[R]:
        """Send, and return an awaitable that ends in the reply, a `RatchetError`, or `AskTimeout`
        after `timeout` seconds.
        """
        ...

    def watch(self, watcher: Recipient) -> None:
        """Tell `watcher` a `Down` once, when the actor or its process ends; at once if it is
        already gone.
        """
        ...


class Directory(Protocol):
    """Finds actors by name."""

    def ref(self, name: str) -> Ref:
        """Return a ref; it may be asked for before the actor is up, and stays right after a
        restart.
        """
        ...


class DeadLetters(Protocol):
    """Counts and logs what could not be delivered."""

    def record(self, *, sender: str | None, receiver: str, message: Any, reason: str) -> None:
        """Note one message."""
        ...
