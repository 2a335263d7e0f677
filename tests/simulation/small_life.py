"""One process of a small world: an actor of the product that reacts to one input at a time.

Consumes inputs: a parcel that arrives, the end of a link, work that is done. Produces a `Reaction`
to each: what it sent, whom it watches, whether it ended, and which work it now waits for. After an
input it runs until nothing is ready, and time stands still. Whatever
leaves the process is plain data, so that what one life has sent can be given to another.

A process knows others by what arrives only. So its inputs, in order, determine all it does.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from tests.helpers.actors import RecordingLog, make_system
from tests.simulation.loop import Process

from ratchet.actors.ref import LocalRef
from ratchet.actors.reply import Reply
from ratchet.actors.system import current_actor
from ratchet.errors import ActorDead
from ratchet.messages import BatchReady, Down, Message, VersionUpdated
from ratchet.transport.mailbox.base import Recipient
from ratchet.transport.mailbox.codec import lane_of

if TYPE_CHECKING:
    from tests.simulation.quiet_loop import QuietLoop

WEIGHTS = 2
"""the lane of the weights, beside the two of the mailbox"""


@dataclass(frozen=True)
class Parcel:
    """Something on its way from one life to a process of that name."""

    sender: str
    life: int
    receiver: str
    lane: int
    kind: str
    """tell | ask | answer | join | weights"""
    number: int
    """of the ask, among those of its life that go on"""
    content: bytes
    """all that the payload says"""
    payload: Any = field(compare=False, repr=False)
    only: int | None = None
    """the one life of the receiver that can use it: the one that asked"""


class End(NamedTuple):
    """The end of a life, as the link to it shows."""

    name: str
    number: int
    clean: bool
    """it ended by itself, and what it had sent arrives"""
    reason: str


Received = Parcel | End | str
"""What a process reacts to; a string names work that is done."""


class Watch(NamedTuple):
    """Whoever sends this wants to hear of the end of a process."""

    name: str


class Reaction(NamedTuple):
    """What a process did."""

    outputs: tuple[Parcel | Watch | End, ...]
    gates: tuple[str, ...]
    """the work that it waits for"""
    problems: tuple[str, ...] = ()


class Life:
    """One life of a process.

    Args:
        start: starts its actor, inside it.
    """

    def __init__(
        self, loop: QuietLoop, name: str, number: int, start: Callable[[Life], LocalRef]
    ) -> None:
        self.loop = loop
        self.name = name
        self.number = number
        self.end = ""
        """why it ended"""
        self.actor: Any = None
        self.parts: Any = None
        """what a test looks at in it"""
        self.problems: list[str] = []
        self.batches: list[BatchReady] = []
        self.told: dict[str, tuple[int, int]] = {}
        """the (term, version) that it last told each other process of"""
        self.asks: dict[int, tuple[str, Reply[Any]]] = {}
        """whom each ask that goes on was sent to"""
        self.watches: dict[str, list[Recipient]] = {}
        self._gates: dict[str, asyncio.Future[None]] = {}
        self._outputs: list[Parcel | Watch | End] = []
        self._process = Process(name)
        ids = itertools.count()
        self.system = make_system(
            rng=random.Random(f"{name}/{number}"),
            new_id=lambda: f"{name}/{number}/{next(ids)}",
            wall_time=lambda: 1.7e9 + loop.now,
            log=RecordingLog(),
            loop=loop,
        )
        self.system.remote = _Directory(self)
        ref = self._process.call(start, self)
        ref.watch(_Obituary(self))
        loop.settle()

    def take(self, received: Received) -> None:
        """React to something."""
        if isinstance(received, str):
            self._inside(self._gates.pop(received).set_result, None)
        elif isinstance(received, End):
            self._inside(self._end_link, received)
        else:
            self._inside(self._deliver, received)
        self.loop.settle()

    def reaction(self) -> Reaction:
        """Return what it has done since the last call."""
        outputs, self._outputs = self._outputs, []
        problems, self.problems = self.problems, []
        gates = [] if self.end else [w for w, done in self._gates.items() if not done.done()]
        return Reaction(tuple(outputs), tuple(sorted(gates)), tuple(problems))

    def die(self, reason: str) -> None:
        """End it: nothing of it runs any more."""
        if not self.end:
            self.end = reason
            self._process.die(self.loop)

    def release(self) -> None:
        """Let what is left of it be cancelled."""
        self.end = self.end or "released"
        self._process.release(self.loop)

    # --- inside

    def send(
        self,
        receiver: str,
        lane: int,
        kind: str,
        payload: Any,
        number: int = 0,
        only: int | None = None,
    ) -> None:
        """Put a parcel on its way; a payload that is no message says itself in its `repr`."""
        is_message = isinstance(payload, Message)
        content = msgspec.msgpack.encode(payload) if is_message else b""
        content += (type(payload).__name__ if is_message else repr(payload)).encode()
        self._outputs.append(
            Parcel(self.name, self.number, receiver, lane, kind, number, content, payload, only)
        )
        if kind == "tell" and isinstance(payload, VersionUpdated):
            new = payload.record.term, payload.record.version
            last = self.told.get(receiver, (0, -1))
            if not (new[0] >= last[0] and new[1] > last[1]):
                self.problems.append(f"I1: {receiver} is told of {last}, then of {new}")
            self.told[receiver] = new

    async def gate(self, what: str) -> None:
        """Wait for the input that says that this work is done."""
        self._gates[what] = self.loop.create_future()
        await self._gates[what]

    def watch(self, name: str, watcher: Recipient) -> None:
        """Tell a watcher of the end of a process, when the link ends."""
        self.watches.setdefault(name, []).append(watcher)
        self._outputs.append(Watch(name))

    def ask(self, receiver: str, message: Message, reply: Reply[Any]) -> None:
        """Send an ask, and keep the reply until it is answered."""
        number = next(number for number in itertools.count() if number not in self.asks)
        self.asks[number] = receiver, reply
        self.send(receiver, lane_of(message), "ask", message, number)

    def over(self, reason: str) -> None:
        """The actor has ended, and its process with it."""
        if not self.end:
            self.die(reason)
            self._outputs.append(End(self.name, self.number, True, reason))

    def _inside(self, function: Callable[..., object], *args: Any) -> None:
        self.loop.call_in(self._process, 0.0, function, *args)

    def _deliver(self, parcel: Parcel) -> None:
        payload = parcel.payload
        if parcel.kind == "tell":
            if isinstance(payload, BatchReady):
                self.batches.append(payload)
            self.system.ref(self.name).tell(payload)
        elif parcel.kind == "ask":
            asked = asyncio.ensure_future(_awaited(self.system.ref(self.name).ask(payload)))
            asked.add_done_callback(lambda done: self._answer(parcel, done))
        elif parcel.kind == "answer":
            _, reply = self.asks.pop(parcel.number, (None, None))
            if reply is not None:
                (reply.fail if isinstance(payload, BaseException) else reply.set)(payload)
        elif parcel.kind == "join":
            self.parts.sender.join(payload)
        else:
            self.parts.receiver.arrive(*payload)

    def _answer(self, ask: Parcel, done: asyncio.Future[Any]) -> None:
        if not done.cancelled():
            answer = done.exception() or done.result()
            self.send(ask.sender, 0, "answer", answer, ask.number, ask.life)

    def _end_link(self, end: End) -> None:
        error = ActorDead(f"the process of {end.name} has ended")
        for number in [number for number, (name, _) in self.asks.items() if name == end.name]:
            self.asks.pop(number)[1].fail(error)
        reason = end.reason if end.clean else str(error)
        for watcher in self.watches.pop(end.name, []):
            watcher.tell(Down(end.name, reason))


@dataclass(frozen=True)
class _Obituary:
    """A process ends with its actor."""

    life: Life

    @property
    def name(self) -> str:
        return self.life.name

    def tell(self, message: Message) -> None:
        assert isinstance(message, Down)
        self.life.over(message.reason)


@dataclass(frozen=True)
class _Directory:
    life: Life

    def ref(self, name: str) -> _FarRef:
        return _FarRef(self.life, name)


class _FarRef(NamedTuple):
    """An actor of another process."""

    life: Life
    name: str

    def tell(self, message: Message) -> None:
        self.life.send(self.name, lane_of(message), "tell", message)

    def ask(self, message: Any, *, block: Any = False, timeout: float) -> Awaitable[Any]:
        reply: Reply[Any] = Reply(
            current_actor.get(),
            self.name,
            type(message).__name__,
            timeout_s=timeout,
            dead_letters=self.life.system.dead_letters,
        )
        self.life.ask(self.name, message, reply)
        return reply

    def watch(self, watcher: Recipient) -> None:
        self.life.watch(self.name, watcher)


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
