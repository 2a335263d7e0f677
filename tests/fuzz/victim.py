"""What belongs to the node under attack: its limits, its actor, the actor's door, and the near ends
of its connections.

Consumes what the node delivers, writes and logs; produces problems, where it should not have.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
from tests.helpers.fuzz import MESSAGES

from ratchet.actors.actor import Actor, Answer
from ratchet.actors.ref import LocalRef
from ratchet.messages import AbortLoad, BurnVersion, VersionBurnt
from ratchet.transport.mailbox import connection
from ratchet.transport.mailbox.base import Recipient
from ratchet.transport.mailbox.limits import Limits

VICTIM = "victim"
LIMITS = Limits(
    frame_bytes=64 << 10,
    fragment_bytes=16 << 10,
    message_bytes=128 << 10,
    queue_messages=2000,
    window_messages=500,
    connections=64,
)
READ_BYTES = connection._READ_BYTES
"""What a connection that has proved itself reads at once; larger than a frame of `LIMITS`."""
SECRET = "only the honest peer says this"


class Quiet:
    """Counts log events; keeps none."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()

    def debug(self, event: str, **fields: Any) -> None:
        str(fields)
        self.count[event] += 1

    info = warning = error = debug


class Echo(Actor[AbortLoad | BurnVersion]):
    """The actor under attack. What it does not accept its inbox turns into dead letters."""

    def __init__(self, system: Any, name: str, honest: list[int]) -> None:
        super().__init__(system, name)
        self._honest = honest

    def receive(self, message: AbortLoad | BurnVersion) -> Answer:
        match message:
            case AbortLoad():
                if message.reason == SECRET:
                    self._honest.append(message.version)
                return None
            case BurnVersion():
                return VersionBurnt(message.version)


class Sieve:
    """The door of the actor: every message that gets here must be whole and of the contract."""

    def __init__(self, actor: LocalRef, problems: list[str]) -> None:
        self.actor = actor
        self.num_delivered = 0
        self.expected = True
        """False while a stranger talks"""
        self._problems = problems

    @property
    def name(self) -> str:
        return VICTIM

    def _check(self, message: Any) -> None:
        self.num_delivered += 1
        if not self.expected:
            self._problems.append(f"a stranger's message was delivered: {message!r:.200}")
        if type(message) not in MESSAGES:
            self._problems.append(f"delivered what is no message: {message!r:.200}")
            return
        plain = msgspec.to_builtins(message, builtin_types=(bytes,))
        try:
            msgspec.convert(plain, type(message))
        except msgspec.ValidationError as error:
            self._problems.append(f"delivered what is not well formed: {error}: {message!r:.200}")

    def tell(self, message: Any) -> None:
        self._check(message)
        self.actor.tell(message)

    def ask(self, message: Any, *, block: Any = False, timeout: float) -> Any:
        self._check(message)
        return self.actor.ask(message, block=block, timeout=timeout)

    def watch(self, watcher: Recipient) -> None:
        self.actor.watch(watcher)


class Wire(asyncio.Transport):
    """The near end of a connection: keeps what the node writes, until it is read."""

    def __init__(self, protocol: Any) -> None:
        super().__init__()
        self.protocol = protocol
        self.written = bytearray()
        self.num_written = 0
        self._closing = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return self._closing

    def write(self, data: Any) -> None:
        self.num_written += len(data)
        if len(self.written) < 1 << 16:
            self.written += data

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close
