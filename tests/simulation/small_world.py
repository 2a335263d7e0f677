"""A world in which every event is chosen: who is delivered what, which work is done, who dies.

The product's four actors, each in a process with a `System` of its own. Nothing happens by itself:
`enabled` lists what may happen next, `do` lets one of it happen and runs what follows inside its
process until nothing is ready there. Time stands still unless `jump` is called.

The network is made of messages. Between two processes there is a link per lane of the real session,
first in, first out; between links any order. The weights take a link of their own. A process dies
between two events: nothing of it runs again, what was on its way to it is lost, and of what it had
sent each receiver gets a beginning and then the end of the link, on which watches are told and asks
fail. What is sent to a dead process is lost until the sender has heard of its end, and waits for
the next life from then on: the promises of `transport/mailbox/peer.py`. What takes time in an
engine or a trainer is a gate that an event opens.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
from tests.helpers.actors import RecordingLog, make_system
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.weights import FakeReceiver, Weights, Wire, digest_of
from tests.simulation.world import RecordingBackend, SeenEngine

from ratchet.actors.ref import LocalRef
from ratchet.actors.reply import Reply
from ratchet.actors.system import System, current_actor
from ratchet.backends.rollout.fake import _completion, fake_token
from ratchet.errors import ActorDead, TransferFailed
from ratchet.messages import Down, Message
from ratchet.transport.mailbox.base import Recipient
from ratchet.transport.mailbox.codec import lane_of
from ratchet.transport.weights.base import LoadReport, SendReport
from ratchet.types import RoleInfo, WeightManifest, WeightRoute

WEIGHTS = 2
"""the lane of the weights, beside the two of the mailbox"""


class Event(NamedTuple):
    """Something that may happen; the same words mean the same in each replay."""

    kind: str
    """deliver | end | done | crash | restart"""
    process: str
    """where it happens"""
    sender: str = ""
    lane: int = 0
    what: str = ""


class QuietLoop(VirtualLoop):
    """Stops when nothing is ready, instead of letting time pass."""

    _jumps = False

    def settle(self) -> None:
        """Run what is ready, and what that makes ready."""
        if self._ready:
            self.run_forever()

    def jump(self) -> bool:
        """Go to the next timer; False if there is none."""
        self._jumps = any(not timer.cancelled() for timer in self._scheduled)  # type: ignore[attr-defined]
        jumps = self._jumps
        if jumps:
            self.run_forever()
        return jumps

    def _run_once(self) -> None:
        if self._ready or self._jumps:
            self._jumps = False
            super()._run_once()
        else:
            self.stop()


@dataclass(eq=False)
class Life:
    """One life of a process, and everything that has happened in it."""

    name: str
    number: int
    process: Process
    system: System
    log: RecordingLog
    history: int = 0
    """a hash of the events, in order"""
    alive: bool = True
    end: str = ""
    clean: bool = False
    """it ended by itself, and what it had sent arrives"""
    actor: Any = None
    parts: Any = None
    asks: dict[Reply[Any], tuple[str, int]] = field(default_factory=dict)
    """whom each ask that goes on was sent to, and which of this life's asks it is"""
    num_asks: int = 0
    watches: dict[str, list[Recipient]] = field(default_factory=dict)
    gates: dict[str, tuple[int, asyncio.Future[None]]] = field(default_factory=dict)


class Parcel(NamedTuple):
    """Something on its way."""

    number: int
    sender: Life
    receiver_life: int
    identity: tuple[str, int, int, bytes]
    """(sender, life, lane, content)"""
    message: Message | None
    deliver: Callable[[Life], None]


Link = tuple[str, str, int]


class SmallNetwork:
    """Processes, links between them, and the choice of what happens."""

    def __init__(self) -> None:
        self.loop = QuietLoop()
        self.leaks: list[str] = []
        self.loop.set_exception_handler(lambda _, c: self.leaks.append(str(c["message"])))
        self.lives: list[Life] = []
        self.newest: dict[str, Life] = {}
        self.observers: list[Callable[[Life, Life, Message], None]] = []
        self._links: dict[Link, deque[Parcel]] = {}
        self._ends: dict[tuple[str, str], tuple[int, Life]] = {}
        self._numbers = itertools.count()
        self._closed = False

    # --- processes

    def begin(self, name: str, start: Callable[[Life], LocalRef]) -> Life:
        """Start a process with one actor."""
        number = sum(life.name == name for life in self.lives)
        log, ids = RecordingLog(), itertools.count()
        system = make_system(
            rng=random.Random(f"{name}/{number}"),
            new_id=lambda: f"{name}/{number}/{next(ids)}",
            wall_time=lambda: 1.7e9 + self.loop.now,
            log=log,
            loop=self.loop,
        )
        process = Process(name)
        life = Life(name, number, process, system, log)
        system.remote = _Directory(self, life)
        self.lives.append(life)
        self.newest[name] = life
        ref = process.call(start, life)
        ref.watch(_Obituary(self, life))
        self.loop.settle()
        return life

    def role(self, kind: Any, life: Life) -> RoleInfo:
        """Describe the actor of a process."""
        return RoleInfo(kind, life.name, f"{life.name}/{life.number}", f"unix:/{life.name}")

    def die(self, life: Life, reason: str, *, clean: bool) -> None:
        """End a process; the others have yet to hear of it."""
        if self._closed or not life.alive:
            return
        life.alive, life.end, life.clean = False, reason, clean
        life.process.die(self.loop)
        for (_, receiver, _), parcels in self._links.items():
            if receiver == life.name:
                parcels.clear()
        for key in [key for key in self._ends if key[1] == life.name]:
            del self._ends[key]
        for other in self.lives:
            if other.alive:
                self._ends[life.name, other.name] = (next(self._numbers), life)

    # --- sending, inside a process

    def post(
        self,
        sender: Life,
        receiver: str,
        lane: int,
        message: Message | None,
        deliver: Callable[[Life], None],
        content: bytes = b"",
    ) -> None:
        """Put something on a link, for that life of the receiver that the sender knows of.

        `content` is what there is to say besides the message.
        """
        there = self.newest[receiver]
        if not there.alive and (receiver, sender.name) in self._ends:
            return  # lost: the sender will hear of the end
        if message is not None:
            content += type(message).__name__.encode() + msgspec.msgpack.encode(message)
        parcel = Parcel(
            next(self._numbers),
            sender,
            there.number if there.alive else there.number + 1,
            (sender.name, sender.number, lane, content),
            message,
            deliver,
        )
        self._links.setdefault((sender.name, receiver, lane), deque()).append(parcel)

    def watch(self, watching: Life, name: str, watcher: Recipient) -> None:
        """Tell a watcher of the end of a process, when the link ends."""
        watching.watches.setdefault(name, []).append(watcher)
        there = self.newest[name]
        if not there.alive:
            self._ends.setdefault((name, watching.name), (next(self._numbers), there))

    async def gate(self, life: Life, what: str) -> None:
        """Wait for the event that says that this work is done."""
        future = self.loop.create_future()
        life.gates[what] = (next(self._numbers), future)
        await future

    # --- what may happen, oldest first

    def enabled(self) -> list[Event]:
        """List what may happen next."""
        events: list[tuple[int, Event]] = []
        for (sender, receiver, lane), parcels in self._links.items():
            if parcels and self._may_arrive(parcels[0], receiver):
                events.append((parcels[0].number, Event("deliver", receiver, sender, lane)))
        for (sender, receiver), (number, life) in self._ends.items():
            if not life.clean or not self._underway(life, receiver):
                events.append((number, Event("end", receiver, sender)))
        for life in self.newest.values():
            if life.alive:
                events += [
                    (number, Event("done", life.name, what=what))
                    for what, (number, future) in life.gates.items()
                    if not future.done()
                ]
        return [event for _, event in sorted(events)]

    def head(self, event: Event) -> Message | None:
        """Return the message that an event would deliver."""
        if event.kind != "deliver":
            return None
        return self._links[event.sender, event.process, event.lane][0].message

    def history_after(self, event: Event) -> tuple[str, int, int]:
        """Return (process, life, history) as they will be after an event there."""
        life = self.newest[event.process]
        if event.kind == "restart":
            return life.name, life.number + 1, 0
        identity: tuple[Any, ...] = event
        if event.kind == "deliver":
            identity = self._links[event.sender, event.process, event.lane][0].identity
        elif event.kind == "end":
            identity = "end", event.sender, self._ends[event.sender, event.process][1].number
        return life.name, life.number, hash((life.history, identity))

    def underway(self) -> tuple[Any, ...]:
        """Return what is on every link, and what ends, for a key of the global state."""
        links = [
            (link, tuple((p.identity, p.receiver_life) for p in parcels))
            for link, parcels in self._links.items()
            if parcels
        ]
        ends = [(key, life.number) for key, (_, life) in self._ends.items()]
        return tuple(sorted(links)), tuple(sorted(ends))

    def do(self, event: Event, *, note: bool = True) -> None:
        """Let something happen, and note it in the history of its process."""
        life = self.newest[event.process]
        if note:
            life.history = self.history_after(event)[2]
        if event.kind == "deliver":
            parcel = self._links[event.sender, event.process, event.lane].popleft()
            if parcel.message is not None:
                for observe in self.observers:
                    observe(parcel.sender, life, parcel.message)
            self._inside(life, parcel.deliver, life)
        elif event.kind == "end":
            self._end_link(*self._ends.pop((event.sender, event.process)), life)
        elif event.kind == "done":
            self._inside(life, life.gates.pop(event.what)[1].set_result, None)
        else:
            assert event.kind == "crash"
            self.die(life, "killed", clean=False)
        self.loop.settle()

    def _inside(self, life: Life, function: Callable[..., object], *args: Any) -> None:
        self.loop.call_in(life.process, 0.0, function, *args)

    def _may_arrive(self, parcel: Parcel, receiver: str) -> bool:
        life = self.newest[receiver]
        if not life.alive or parcel.receiver_life != life.number:
            return False
        end = self._ends.get((parcel.sender.name, receiver))  # of a life before this sender's
        return end is None or end[1] is parcel.sender

    def _underway(self, life: Life, receiver: str) -> bool:
        return any(
            parcel.sender is life
            for (_, to, _), parcels in self._links.items()
            for parcel in parcels
            if to == receiver
        )

    def _end_link(self, _number: int, gone: Life, life: Life) -> None:
        for (_, receiver, _), parcels in self._links.items():
            if receiver == life.name:
                for parcel in [parcel for parcel in parcels if parcel.sender is gone]:
                    parcels.remove(parcel)
        error = ActorDead(f"the process of {gone.name} has ended")
        for reply in [reply for reply, (name, _) in life.asks.items() if name == gone.name]:
            del life.asks[reply]
            self._inside(life, reply.fail, error)
        reason = gone.end if gone.clean else str(error)
        for watcher in life.watches.pop(gone.name, []):
            self._inside(life, watcher.tell, Down(gone.name, reason))

    def close(self) -> None:
        """Let go of everything."""
        self._closed = True
        for life in self.lives:
            life.process.release(self.loop)
        while tasks := asyncio.all_tasks(self.loop):  # some wait again while they are cancelled
            for task in tasks:
                task.cancel()
            self.loop.settle()
        self.loop.close()


@dataclass(frozen=True)
class _Obituary:
    """A process ends with its actor."""

    network: SmallNetwork
    life: Life

    @property
    def name(self) -> str:
        return self.life.name

    def tell(self, message: Message) -> None:
        assert isinstance(message, Down)
        self.network.die(self.life, message.reason, clean=True)


@dataclass(frozen=True)
class _Directory:
    network: SmallNetwork
    life: Life

    def ref(self, name: str) -> _FarRef:
        return _FarRef(self.network, self.life, name)


class _FarRef(NamedTuple):
    """An actor of another process."""

    network: SmallNetwork
    life: Life
    name: str

    def tell(self, message: Message) -> None:
        def deliver(there: Life) -> None:
            there.system.ref(self.name).tell(message)

        self.network.post(self.life, self.name, lane_of(message), message, deliver)

    def ask(self, message: Any, *, block: Any = False, timeout: float) -> Awaitable[Any]:
        system = self.life.system
        reply: Reply[Any] = Reply(
            current_actor.get(),
            self.name,
            type(message).__name__,
            timeout_s=timeout,
            dead_letters=system.dead_letters,
        )
        number = self.life.num_asks
        self.life.num_asks += 1
        self.life.asks[reply] = self.name, number

        def deliver(there: Life) -> None:
            asked = asyncio.ensure_future(_awaited(there.system.ref(self.name).ask(message)))
            asked.add_done_callback(lambda done: self._answer(there, reply, done, content))

        content = b"ask %d " % number
        self.network.post(self.life, self.name, lane_of(message), message, deliver, content)
        return reply

    def _answer(
        self, there: Life, reply: Reply[Any], done: asyncio.Future[Any], content: bytes
    ) -> None:
        if done.cancelled():
            return
        error = done.exception()
        answer = None if error is not None else done.result()

        def deliver(life: Life) -> None:
            if life is self.life and life.asks.pop(reply, None) is not None:
                if error is not None:
                    reply.fail(error)
                else:
                    reply.set(answer)

        content += repr(error).encode()
        self.network.post(there, self.life.name, 0, answer, deliver, content)

    def watch(self, watcher: Recipient) -> None:
        self.network.watch(self.life, self.name, watcher)


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


# --- what takes time


class GatedEngine(SeenEngine):
    """Generates the first token of a completion at once, and the others when it is let."""

    def __init__(self, network: SmallNetwork, life: Life) -> None:
        super().__init__()
        self._network = network
        self._life = life
        self._num_started = 0

    async def _produce(self, prompt_ids: Any, params: Any, pause_s: float, future: Any) -> None:
        number = self._num_started
        self._num_started += 1
        made = []
        for position in range(params.max_tokens):
            if position:
                await self._network.gate(self._life, f"generation {number}.{position}")
            version = await self._wait_for_version()
            made.append((*fake_token(self._weights, prompt_ids, params.seed, position), version))
            self._generated_tokens += 1
        if not future.done():
            future.set_result(_completion(made))


class GatedBackend(RecordingBackend):
    """Takes each half of a step when it is let."""

    def __init__(self, network: SmallNetwork, life: Life) -> None:
        super().__init__(size=4, seed=life.number)
        self._network = network
        self._life = life

    async def forward_backward(self, groups: Any) -> Any:
        await self._network.gate(self._life, f"forward {self.num_batches}")
        return await super().forward_backward(groups)

    async def optimizer_step(self) -> Any:
        await self._network.gate(self._life, f"step {self.num_batches}")
        return await super().optimizer_step()


class MailedSender:
    """Sends weights as messages, once every engine has joined."""

    def __init__(
        self, network: SmallNetwork, life: Life, wire: Wire, weights: Callable[[], Weights]
    ) -> None:
        self._network = network
        self._life = life
        self._wire = wire
        self._weights = weights
        self._num_transfers = 0
        self._joined: dict[str, asyncio.Future[None]] = {}
        self._engines: dict[str, str] = {}

    def plan(
        self, term: int, version: int, step: int, engines: Sequence[str], *, catch_up: bool = False
    ) -> Any:
        weights = self._weights()
        known = self._wire.sent.setdefault(version, weights)
        assert np.array_equal(known, weights), f"version {version} names two sets of weights"
        routes = {}
        self._joined, self._engines = {}, {}
        for rank, engine in enumerate(engines, start=1):
            group = f"{self._life.number}/{self._num_transfers}/{engine}"
            self._joined[group] = self._network.loop.create_future()
            self._engines[group] = engine.split("/")[0]
            timeout_s = self._wire.timeout_s
            routes[engine] = WeightRoute("fake", "none", "", 0, group, rank, 2, timeout_s)
        self._num_transfers += 1
        return WeightManifest(term, version, step, (), (), {}), routes

    async def send(self, manifest: WeightManifest) -> SendReport:
        weights = self._weights()
        digest = digest_of(weights)
        _, absent = await asyncio.wait(self._joined.values(), timeout=self._wire.timeout_s)
        if absent:
            raise TransferFailed("an engine did not join")
        for group, engine in self._engines.items():

            def deliver(there: Life, group: str = group) -> None:
                there.parts.receiver.arrive(group, weights, digest)

            content = f"{group} {digest}".encode()
            self._network.post(self._life, engine, WEIGHTS, None, deliver, content)
        return SendReport(digest, weights.nbytes, 1, 0.0, 0.0)

    def join(self, group: str) -> None:
        if group in self._joined and not self._joined[group].done():
            self._joined[group].set_result(None)

    async def close(self) -> None:
        pass


class MailedReceiver(FakeReceiver):
    """Joins by a message, and gets the weights as one."""

    def __init__(self, network: SmallNetwork, life: Life, wire: Wire, trainer: str) -> None:
        super().__init__(wire)
        self._network = network
        self._life = life
        self._trainer = trainer
        self._group = ""

    async def receive(
        self, manifest: WeightManifest, route: WeightRoute, sink: Any, mode: Any
    ) -> LoadReport:
        if self._waiting is not None:
            raise TransferFailed("this engine is still receiving an earlier version")
        self._waiting = self._network.loop.create_future()
        self._group = route.group
        self._network.post(
            self._life,
            self._trainer,
            WEIGHTS,
            None,
            lambda there: there.parts.sender.join(route.group),
            route.group.encode(),
        )
        try:
            async with asyncio.timeout(route.timeout_s + 1):
                weights, digest = await self._waiting
            return await self._load(weights, digest, manifest, sink, mode)
        except TimeoutError:
            raise TransferFailed("nothing arrived") from None
        finally:
            self._waiting = None

    def arrive(self, group: str, weights: Weights, digest: str) -> None:
        if self._waiting is not None and not self._waiting.done() and group == self._group:
            self._waiting.set_result((weights, digest))
