"""Refs to actors behind a link, and to the actors of this process by name.

Consumes messages, produces envelopes. An ask waits for its reply; the peer's end or the deadline
unblocks it.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, TypeVar, cast

from ratchet.errors import ActorDead, ProtocolError, RatchetError
from ratchet.messages import Ask, Down, Message
from ratchet.transport.mailbox.base import Recipient, Ref, current_trace
from ratchet.transport.mailbox.calls import Calls
from ratchet.transport.mailbox.codec import encode_envelope, encode_note, encode_parcel, lane_of
from ratchet.transport.mailbox.dispatch import Dispatcher
from ratchet.transport.mailbox.frames import BULK, CONTROL, Request, Tell, Watch
from ratchet.transport.mailbox.peer import Peer

R = TypeVar("R")

_NO_TRACE: Final = (None, None)


class RemoteRef:
    """A handle on the actor that has the name of another node. It stays right when that node
    restarts.
    """

    def __init__(self, sender: str, peer: Peer, calls: Calls, dispatcher: Dispatcher) -> None:
        self._sender = sender
        self._peer = peer
        self._calls = calls
        self._dispatcher = dispatcher

    def __repr__(self) -> str:
        return f"RemoteRef({self.name!r})"

    @property
    def name(self) -> str:
        """The actor's name."""
        return self._peer.name

    def tell(self, message: Message) -> None:
        """Send and forget; what cannot be delivered becomes a dead letter."""
        trace_id, version = current_trace.get() or _NO_TRACE
        envelope = Tell(self._sender, self._peer.name, trace_id, version, message)
        try:
            self._send(envelope)
        except ProtocolError as error:
            self._dispatcher.bury(self.name, message, str(error))

    def _send(self, envelope: Tell[Any] | Request[Any]) -> None:
        if lane_of(envelope.body) == CONTROL:
            self._peer.send(CONTROL, encode_envelope(envelope))
        else:
            self._peer.send(BULK, *encode_parcel(envelope))

    def ask(
        self, message: Ask[R], *, block: Literal[False] = False, timeout: float
    ) -> Awaitable[R]:
        """Send, and return a future of the reply.

        It ends with `AskTimeout` after `timeout` seconds, with `ActorDead` when the actor or its
        process ends, with `AuthFailed` when the link cannot be opened, or with the error that the
        actor raised.
        """
        ask_id, future = self._calls.open_ask(self.name, type(message).__name__, timeout)
        trace_id, version = current_trace.get() or _NO_TRACE
        envelope = Request(self._sender, self.name, trace_id, version, ask_id, timeout, message)
        try:
            self._send(envelope)
        except ProtocolError as error:
            self._calls.fail(ask_id, error)
        return cast("asyncio.Future[R]", future)

    def watch(self, watcher: Recipient) -> None:
        """Tell `watcher` a `Down` once, when the actor or its process ends.

        At once if its last known life is over and no other has begun, or if it cannot be reached
        for good. A node that was never reached is given the delivery deadline to come up.
        """
        over = self._peer.trouble
        if over is not None:
            watcher.tell(Down(self.name, str(over)))
            return
        watch_id = self._calls.watch(self.name, watcher)
        self._peer.send(CONTROL, encode_note(Watch(watch_id, self.name)))


class HomeRef:
    """An actor of this process by name: found anew for each message, so that it may be asked for
    before the actor is up, and stays right after a restart.
    """

    def __init__(
        self, name: str, local: Callable[[str], Ref | None], dispatcher: Dispatcher
    ) -> None:
        self._name = name
        self._local = local
        self._dispatcher = dispatcher

    def __repr__(self) -> str:
        return f"HomeRef({self.name!r})"

    @property
    def name(self) -> str:
        """The actor's name."""
        return self._name

    def tell(self, message: Message) -> None:
        """Send and forget."""
        actor = self._local(self._name)
        if actor is None:
            self._dispatcher.bury(self._name, message, self._absent)
        else:
            actor.tell(message)

    def ask(
        self, message: Ask[R], *, block: Literal[False] = False, timeout: float
    ) -> Awaitable[R]:
        """Send, and return an awaitable of the reply; `ActorDead` if the actor is not there."""
        actor = self._local(self._name)
        if actor is None:
            return _failed(ActorDead(self._absent))
        return actor.ask(message, block=block, timeout=timeout)

    def watch(self, watcher: Recipient) -> None:
        """Tell `watcher` when the actor ends; at once if it is not there."""
        actor = self._local(self._name)
        if actor is None:
            watcher.tell(Down(self._name, self._absent))
        else:
            actor.watch(watcher)

    @property
    def _absent(self) -> str:
        return f"there is no actor {self._name} in this process"


def _failed(error: RatchetError) -> asyncio.Future[R]:
    future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    return future


class Refs(dict[str, Ref]):
    """The refs of a node by name."""

    def is_held(self, name: str) -> bool:
        """Tell whether anybody still holds a ref to an actor; forget one that nobody holds."""
        ref = self.pop(name, None)
        if ref is None:
            return False
        held = weakref.ref(ref)
        del ref
        if (ref := held()) is None:
            return False
        self[name] = ref
        return True
