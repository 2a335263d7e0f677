"""Hands what arrives to the actors of this process, and accounts for what cannot be handed on.

Consumes envelopes, produces tells and asks of local refs, and their answers to the peer. Waits for
nothing: an answer is sent when the actor's future is done, and the actor's own deadline ends that.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import Raw

from ratchet import errors
from ratchet.errors import ActorDead, HandlerFailed, ProtocolError, RatchetError
from ratchet.messages import Ask, Down, Message
from ratchet.transport.mailbox.base import DeadLetters, Ref, Trace, current_trace
from ratchet.transport.mailbox.calls import Calls
from ratchet.transport.mailbox.codec import (
    decode_body,
    decode_envelope,
    encode_envelope,
    encode_note,
)
from ratchet.transport.mailbox.flight import Item
from ratchet.transport.mailbox.frames import (
    BULK,
    CONTROL,
    Answer,
    Body,
    Ended,
    Envelope,
    Failure,
    Request,
    Tell,
    Watch,
)
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.peer import Peer, SessionKey


class Dispatcher:
    """The receiving half of a node."""

    def __init__(
        self,
        *,
        name: str,
        local: Callable[[str], Ref | None],
        calls: Calls,
        dead_letters: DeadLetters,
        limits: Limits,
    ) -> None:
        self._name = name
        self._local = local
        self._calls = calls
        self._dead_letters = dead_letters
        self._limits = limits
        self._answering: dict[asyncio.Future[Any], None] = {}  # ordered, as a set is not

    def deliver(self, peer: Peer, envelopes: list[Envelope]) -> None:
        """Handle envelopes in order, each under its own trace."""
        before = current_trace.set(None)
        try:
            for envelope in envelopes:
                match envelope:
                    case Tell():
                        self._on_tell(envelope)
                    case Request():
                        self._on_request(peer, envelope)
                    case Answer():
                        self._on_answer(peer, envelope)
                    case _:
                        self._on_note(peer, envelope)
        finally:
            current_trace.reset(before)

    def lost(self, peer: Peer, items: list[Item], error: RatchetError) -> None:
        """Account for envelopes that did not reach `peer`."""
        for item in items:
            envelope = decode_envelope(item.body, item.arrays)
            match envelope:
                case Tell():
                    self._bury(envelope, str(error))
                case Request():  # its error is its account
                    self._calls.fail(envelope.ask_id, type(error)(str(error)))
                case Answer():
                    self.bury(peer.name, self._readable(envelope), str(error))
                case Failure():
                    self.bury(peer.name, envelope, str(error))
                case Watch():
                    self._calls.end_watch(envelope.watch_id, str(error))
                case Ended():
                    pass  # its watcher is told by the end of the link

    def bury(self, receiver: str, message: Any, reason: str) -> None:
        """Record a message of this node that will not be sent."""
        self._dead_letters.record(
            sender=self._name, receiver=receiver, message=message, reason=reason
        )

    def _bury(self, envelope: Tell[Body], reason: str) -> None:
        self._dead_letters.record(
            sender=envelope.sender,
            receiver=envelope.receiver,
            message=self._readable(envelope),
            reason=reason,
        )

    def _readable(self, envelope: Tell[Body] | Answer[Body]) -> Message | bytes:
        """Return the message, or its bytes if it is none."""
        body = envelope.body
        try:
            return decode_body(body, self._limits.depth)
        except ProtocolError:
            return bytes(body) if isinstance(body, Raw) else body

    # --- what arrives

    def _find(self, receiver: str) -> Ref:
        actor = self._local(receiver)
        if actor is None:
            raise ActorDead(f"there is no actor {receiver} in the process of {self._name}")
        return actor

    def _enter(self, envelope: Tell[Body] | Request[Body]) -> Message:
        """Take over the trace of an envelope, and return its message."""
        trace_id, body = envelope.trace_id, envelope.body
        current_trace.set(None if trace_id is None else Trace(trace_id, envelope.version))
        return decode_body(body, self._limits.depth) if isinstance(body, Raw) else body

    def _on_tell(self, envelope: Tell[Body]) -> None:
        try:
            message = self._enter(envelope)
            self._find(envelope.receiver).tell(message)
        except Exception as error:  # noqa: BLE001 - it stays with this message, see `_as_ratchet`
            self._bury(envelope, str(_as_ratchet(error)))

    def _on_request(self, peer: Peer, envelope: Request[Body]) -> None:
        try:
            message = self._enter(envelope)
            if not isinstance(message, Ask):
                raise HandlerFailed(f"{type(message).__name__} is told, it has no reply")
            if not math.isfinite(envelope.timeout_s):  # a timer at NaN keeps all others waiting
                raise HandlerFailed(f"an ask has a deadline, and not {envelope.timeout_s} s")
            actor = self._find(envelope.receiver)
            reply = asyncio.ensure_future(  # noqa: TID251 - of the asker; we keep it until it is done
                actor.ask(message, block=False, timeout=envelope.timeout_s)
            )
        except Exception as error:  # noqa: BLE001 - it stays with this message, see `_as_ratchet`
            failure = Failure(envelope.ask_id, *errors.to_wire(_as_ratchet(error)))
            peer.send(CONTROL, encode_note(failure))
            return
        asked_in = peer.session_key
        if reply.done():
            self._answer(peer, asked_in, envelope.ask_id, reply)
        else:
            self._answering[reply] = None
            reply.add_done_callback(partial(self._answer, peer, asked_in, envelope.ask_id))

    def _answer(
        self, peer: Peer, asked_in: SessionKey, ask_id: int, reply: asyncio.Future[Message]
    ) -> None:
        self._answering.pop(reply, None)
        envelope = _to_answer(ask_id, reply)
        if peer.session_key == asked_in:
            # an answer follows on nothing but its question: a long one may leave the control lane
            long = len(envelope) > self._limits.fragment_bytes
            peer.send(BULK if long else CONTROL, envelope)
        elif not reply.cancelled() and reply.exception() is None:
            self.bury(peer.name, reply.result(), f"the life of {peer.name} that asked is over")

    def _on_answer(self, peer: Peer, envelope: Answer[Body]) -> None:
        try:
            message = decode_body(envelope.body, self._limits.depth)
        except ProtocolError as error:
            self._calls.fail(envelope.ask_id, error, by=peer.name)
        else:
            self._calls.reply(envelope.ask_id, message, by=peer.name)

    def _on_note(self, peer: Peer, envelope: Failure | Watch | Ended) -> None:
        """Handle what belongs to no trace."""
        current_trace.set(None)
        match envelope:
            case Failure():
                error = errors.from_wire(envelope.kind, envelope.text)
                self._calls.fail(envelope.ask_id, error, by=peer.name)
            case Watch():
                self._on_watch(peer, envelope)
            case Ended():
                self._calls.end_watch(envelope.watch_id, envelope.reason, by=peer.name)

    def _on_watch(self, peer: Peer, envelope: Watch) -> None:
        actor = self._local(envelope.receiver)
        if actor is None:
            reason = f"there is no actor {envelope.receiver} in the process of {self._name}"
            peer.send(CONTROL, encode_note(Ended(envelope.watch_id, reason)))
        else:
            actor.watch(_RemoteWatcher(peer, envelope.watch_id))

    def close(self) -> None:
        """Answer nobody any more."""
        for reply in tuple(self._answering):
            reply.cancel()


class _RemoteWatcher:
    """Stands for a watcher on another node: passes its `Down` on."""

    def __init__(self, peer: Peer, watch_id: int) -> None:
        self._peer = peer
        self._watched_in = peer.session_key
        self._watch_id = watch_id

    @property
    def name(self) -> str:  # of one watch: an actor tells each name once
        return f"{self._peer.name}#{self._watch_id}"

    def tell(self, message: Message) -> None:
        if isinstance(message, Down) and self._peer.session_key == self._watched_in:
            self._peer.send(CONTROL, encode_note(Ended(self._watch_id, message.reason)))


def _as_ratchet(error: Exception) -> RatchetError:
    """Return what is told of an error. An actor's inbox should not raise; if it does, the error
    stays with this message and does not take down the link.
    """
    if isinstance(error, RatchetError):
        return error
    return HandlerFailed(f"{type(error).__name__}: {error}")


def _to_answer(ask_id: int, reply: asyncio.Future[Message]) -> bytes:
    """Encode whatever a reply has ended in."""
    error: BaseException | None
    if reply.cancelled():
        error = ActorDead("the ask was cancelled where it was handled")
    else:
        error = reply.exception()
    if error is None:
        try:
            return encode_envelope(Answer(ask_id, reply.result()))
        except ProtocolError as problem:
            error = problem
    return encode_note(Failure(ask_id, *errors.to_wire(error)))
