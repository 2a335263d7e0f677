"""The processes of a world and the real links between them.

Every process has a `System` and a `Node` of its own: hello, session, lanes, acks and refs are the
product's, over a `SimulatedWire`. Each message that reaches an actor is a line of the trace, so
that two runs can be compared event by event, and is shown to the observers before the actor sees
it.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from tests.helpers.actors import RecordingLog, make_system
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.wire import SimulatedWire

from ratchet.actors.role import REGISTRY
from ratchet.actors.system import System
from ratchet.messages import Message
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.base import Recipient, Ref
from ratchet.transport.mailbox.frames import Answer, Envelope
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.node import Node
from ratchet.transport.mailbox.peer import Peer, SessionKey

Observer = Callable[[str, str, Message], None]

KEY = bytes(range(32))


class Host:
    """One life of a process: its clock, its system and its node."""

    def __init__(self, network: Network, name: str, life: int, ask_timeout_s: float) -> None:
        rng = random.Random(f"{network.seed}/{name}/{life}")
        ids = itertools.count()
        self.name = name
        self.incarnation = f"{name}/{life}"
        self.process = Process(
            name, offset=rng.uniform(0, 1e4), rate=1 + rng.uniform(-1, 1) * network.drift
        )
        self.wall_jump_s = 0.0
        self.stopped_at: float | None = None
        """since when it does not run"""
        self.thawed_at = -math.inf
        """when it last went on after it had been stopped"""
        self.log = RecordingLog()
        self.system: System = make_system(
            rng=rng,
            new_id=lambda: f"{name}/{life}/{next(ids)}",
            wall_time=lambda: 1.7e9 + network.loop.now + self.wall_jump_s,
            log=self.log,
            ask_timeout_s=ask_timeout_s,
            registry_wait_s=2 * ask_timeout_s,
            loop=network.loop,
        )
        self.address = Address("unix", f"/{name}")
        if (network.moves and name != REGISTRY) or self.address in network.wire.doors:
            self.address = Address("unix", f"/{name}.{life}")  # two cannot listen at one address
        self.system.book.learn(REGISTRY, f"unix:/{REGISTRY}")
        self.node = self.process.call(self._open, network)

    def _open(self, network: Network) -> _Node:
        node = _Node(
            network,
            name=self.name,
            incarnation=self.incarnation,
            address=self.address,
            key=KEY,
            run_id="run",
            local=self.system.local,
            locate=self.system.book.locate,
            is_newest=self.system.book.is_newest,
            dead_letters=self.system.dead_letters,
            new_id=self.system.new_id,
            random_bytes=random.Random(self.incarnation).randbytes,
            log=self.log,
            limits=network.limits,
            wire=network.wire,
        )
        self.system.remote = node
        self.system.links = node.links
        _at_once(node.start())
        return node

    @property
    def lives(self) -> bool:
        """It has not died."""
        return not self.process.dead


class Network:
    """Starts, stops and kills processes, and disturbs the links between them."""

    def __init__(
        self,
        loop: VirtualLoop,
        seed: int,
        *,
        limits: Limits,
        mean_delay_s: float = 0.002,
        tail: tuple[float, float] = (0.0, 1.0),
        drift: float = 0.0,
        moves: bool = False,
    ) -> None:
        """Make the network of one world.

        Args:
            loop: where everything runs.
            seed: of delays and of what is lost.
            limits: of all nodes.
            mean_delay_s: of an exponential distribution.
            tail: share of what is slow on top, and the mean of what is on top.
            drift: the most that a process's clock is off, per second.
            moves: each life of a role listens at another address.
        """
        self.loop = loop
        self.seed = seed
        self.limits = limits
        self.drift = drift
        self.moves = moves
        self.wire = SimulatedWire(
            loop, seed, mean_delay_s=mean_delay_s, tail=tail, most_s=limits.dead_s / 5
        )
        self.trace: list[tuple[float, str, str, str]] = []
        self.observers: list[Observer] = []
        self.deaths: list[Callable[[Process], object]] = []
        """told of each process that has died"""
        self.hosts: dict[str, Host] = {}
        """the newest life of each name"""
        self._lives = itertools.count(1)

    def start(self, name: str, ask_timeout_s: float) -> Host:
        """Begin a life; an older one of the name may live on, where nobody looks for it."""
        host = self.hosts[name] = Host(self, name, next(self._lives), ask_timeout_s)
        return host

    def living(self) -> dict[str, Host]:
        """The newest lives that have not ended."""
        return {name: host for name, host in self.hosts.items() if host.lives}

    def alive(self, name: str) -> bool:
        """Whether a process of that name runs."""
        return name in self.hosts and self.hosts[name].lives

    def kill(self, host: Host) -> None:
        """End a process at once: SIGKILL."""
        if host.lives:
            host.process.die(self.loop)
            for hear in (self.wire.bury, *self.deaths):
                hear(host.process)

    async def leave(self, host: Host, within_s: float = 1.0) -> None:
        """End a process as a role's does that has ended: what it has said is sent."""
        await host.node.stop(within_s)
        self.kill(host)

    def freeze(self, host: Host, seconds: float) -> None:
        """Stop a process for a while: SIGSTOP, then SIGCONT."""
        host.process.stop(self.loop)
        host.stopped_at = self.loop.now
        self.loop.call_in(None, seconds, self._thaw, host)

    def _thaw(self, host: Host) -> None:
        host.thawed_at, host.stopped_at = self.loop.now, None
        host.process.go_on(self.loop)

    def silence(self, name: str, seconds: float, *, inward: bool, outward: bool) -> None:
        """Hold back what goes to a process, or comes from it."""
        for other in self.hosts:
            if outward:
                self.wire.hold(name, other, seconds)
            if inward:
                self.wire.hold(other, name, seconds)

    def note(self, sender: str, receiver: str, message: Message) -> None:
        """One line of the trace."""
        self.trace.append((round(self.loop.now, 9), sender, receiver, type(message).__name__))
        for observe in self.observers:
            observe(sender, receiver, message)


class _Node(Node):
    """Shows what it hands to its actors."""

    def __init__(
        self, network: Network, *, local: Callable[[str], Ref | None], **kwargs: Any
    ) -> None:
        self._network = network
        self._from = "?"
        self.num_delivered: Counter[SessionKey] = Counter()
        """pieces"""
        self._actor = local
        super().__init__(local=self._noted, **kwargs)

    def deliver(self, peer: Peer, envelopes: list[Envelope]) -> None:
        self._from = peer.name
        self.num_delivered[peer.session_key] += sum(map(self._num_pieces, envelopes))
        super().deliver(peer, envelopes)

    def _num_pieces(self, envelope: Envelope) -> int:
        """One, but for an answer that tells of thousands of versions."""
        if not isinstance(envelope, Answer):
            return 1
        size = len(msgspec.msgpack.encode(envelope))
        return -(-size // self._network.limits.fragment_bytes)

    def _noted(self, name: str) -> Ref | None:
        actor = self._actor(name)
        return None if actor is None else _NotedRef(self._network, self._from, actor)


class _NotedRef:
    def __init__(self, network: Network, sender: str, actor: Ref) -> None:
        self._network = network
        self._sender = sender
        self._actor = actor

    @property
    def name(self) -> str:
        return self._actor.name

    def tell(self, message: Message) -> None:
        self._network.note(self._sender, self.name, message)
        self._actor.tell(message)

    def ask(self, message: Any, *, block: Any = False, timeout: float) -> Awaitable[Any]:
        self._network.note(self._sender, self.name, message)
        asked = asyncio.ensure_future(self._actor.ask(message, block=False, timeout=timeout))
        asked.add_done_callback(self._answered)
        return asked

    def _answered(self, asked: asyncio.Future[Any]) -> None:
        if not asked.cancelled() and asked.exception() is None:
            self._network.note(self.name, self._sender, asked.result())

    def watch(self, watcher: Recipient) -> None:
        self._actor.watch(watcher)


def _at_once(coro: Any) -> None:
    """Run a coroutine that waits for nothing."""
    try:
        coro.send(None)
    except StopIteration:
        return
    raise RuntimeError("it waits for something")
