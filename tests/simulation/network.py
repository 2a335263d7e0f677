"""Links between simulated processes: a message arrives after a random delay, in order per link.

Every process has a `System` of its own, whose `remote` is this network seen from there. Each
delivery is a line of the trace, so that two runs can be compared event by event. What can go wrong
follows the real links (`ratchet.transport.mailbox`): a killed process may leave messages on the
wire, which still arrive before the news of its death; a silent link holds messages back, and after
`DEAD_S` each end gives the other up, loses what was held, and ends the asks.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

from ratchet.actors.system import System
from ratchet.errors import ActorDead, AskTimeout, from_wire, to_wire
from ratchet.messages import Down, Message
from ratchet.transport.mailbox.base import Recipient

Observer = Callable[[str, str, Message], None]

DEAD_S = 30.0
"""Silence after which a peer counts as dead, and the longest that a message waits for a peer."""


class Network:
    """Delivers between systems, kills processes, and holds links back."""

    def __init__(
        self, seed: int, *, mean_delay_s: float = 0.002, tail_share: float = 0.0, tail_s: float = 0
    ) -> None:
        """Draw the delays.

        Args:
            seed: of the delays.
            mean_delay_s: of an exponential distribution.
            tail_share: share of the messages that are slow on top.
            tail_s: mean of what is on top.
        """
        self.trace: list[tuple[float, str, str, str]] = []
        self.observers: list[Observer] = []
        self.duplicate_share = 0.0
        self.duplicates: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._mean_delay_s = mean_delay_s
        self._tail = (tail_share, tail_s)
        self._arrivals: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._silent_until: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._lives: Counter[tuple[str, str]] = Counter()
        self._systems: dict[str, System] = {}
        self._dead: set[System] = set()
        self._watchers: defaultdict[str, list[Recipient]] = defaultdict(list)
        self._asks: dict[asyncio.Future[Any], tuple[str, str]] = {}

    # --- processes

    def attach(self, name: str, system: System) -> None:
        """Connect a process that hosts the actor of this name."""
        system.remote = _View(self, name, system)
        self._systems[name] = system

    def system(self, name: str) -> System | None:
        """The process that hosts an actor now."""
        return self._systems.get(name)

    def living(self) -> dict[str, System]:
        """Every process that runs and can be reached."""
        return dict(self._systems)

    def watch(self, name: str, watcher: Recipient) -> None:
        """Remember a watch."""
        self._watchers[name].append(watcher)

    def kill(self, name: str, reason: str = "killed", *, only: System | None = None) -> None:
        """End a process for good, and tell whoever watches. Idempotent.

        Args:
            name: of the process.
            reason: what the watchers hear.
            only: do nothing if another process has the name by now.
        """
        system = self._systems.get(name)
        if system is None or (only is not None and system is not only):
            return
        del self._systems[name]
        self._dead.add(system)
        keep = self._rng.random() < 0.5  # what the process had written may still arrive
        for other in [*self._systems, name]:
            self._lives[other, name] += 1
            if not keep:
                self._lives[name, other] += 1
        system.abort()
        self._mourn(name, reason)

    def _mourn(self, name: str, reason: str) -> None:
        for watcher in self._watchers.pop(name, []):
            self.later(name, watcher.name, lambda w=watcher: w.tell(Down(name, reason)))

    # --- links

    def silence(self, name: str, seconds: float, *, inward: bool, outward: bool) -> None:
        """Cut a process off from all others for a while, one way or both."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        for other in self._systems:
            if outward:
                self._silent_until[name, other] = until
            if inward:
                self._silent_until[other, name] = until
        if seconds > DEAD_S:
            loop.call_later(DEAD_S, self._give_up, name, self._systems.get(name))

    def _give_up(self, name: str, system: System | None) -> None:
        if system is None or self._systems.get(name) is not system:
            return
        for other in self._systems:
            self._lives[other, name] += 1
            self._lives[name, other] += 1
        for reply, (asker, asked) in list(self._asks.items()):
            if name in (asker, asked):
                _settle(reply, error=ActorDead(f"{asked} does not answer {asker}"))
        for watcher in self._watchers.pop(name, []):
            watcher.tell(Down(name, f"silent for {DEAD_S:g} s"))
        for other, watchers in self._watchers.items():  # and it gives up the others
            for watcher in [w for w in watchers if w.name == name]:
                watchers.remove(watcher)
                watcher.tell(Down(other, f"silent for {DEAD_S:g} s"))

    def later(
        self,
        sender: str,
        receiver: str,
        action: Callable[[], None],
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        """Act after the delay of one message, behind all earlier ones of the link; or not at all,
        when the link has a new life by then.
        """
        link = sender, receiver
        loop = asyncio.get_running_loop()
        delay = self._rng.expovariate(1 / self._mean_delay_s)
        if self._rng.random() < self._tail[0]:
            delay += self._rng.expovariate(1 / self._tail[1])
        ready = max(loop.time(), self._silent_until[link])
        if ready - loop.time() > DEAD_S:
            loop.call_later(DEAD_S, lost)
            return
        # strictly later: timers of the same instant have no order of their own
        at = self._arrivals[link] = max(self._arrivals[link] + 1e-6, ready + delay)
        life = self._lives[link]
        loop.call_at(at, lambda: action() if self._lives[link] == life else lost())

    def send(self, sender: str, receiver: str, message: Message) -> None:
        """Tell; sometimes twice, in order, so that a slow link can keep the second one back."""
        self.later(sender, receiver, lambda: self._deliver(sender, receiver, message))
        if self._rng.random() < self.duplicate_share:
            self.duplicates[type(message).__name__] += 1
            self.later(sender, receiver, lambda: self._deliver(sender, receiver, message))

    def _deliver(self, sender: str, receiver: str, message: Message) -> None:
        system = self._systems.get(receiver)
        if system is not None:
            self.note(sender, receiver, message)
            system.ref(receiver).tell(message)

    def ask(self, sender: str, receiver: str, message: Any) -> asyncio.Future[Any]:
        """Ask; the future ends in the reply or in `ActorDead`, if it ends."""
        reply = asyncio.get_running_loop().create_future()
        self._asks[reply] = sender, receiver
        reply.add_done_callback(lambda done: self._asks.pop(done))
        dead = ActorDead(f"there is no actor {receiver}")

        def deliver() -> None:
            system = self._systems.get(receiver)
            if system is None:
                _settle(reply, error=dead)
                return
            self.note(sender, receiver, message)
            asked = asyncio.ensure_future(
                _outcome(system.ref(receiver).ask(message, block=False, timeout=1e6))
            )
            asked.add_done_callback(
                lambda done: None if done.cancelled() else send_back(done.result())
            )

        def send_back(outcome: Any) -> None:
            # lost: the asker hears that its peer is gone
            self.later(
                receiver, sender, lambda: arrive(outcome), lambda: _settle(reply, error=dead)
            )

        def arrive(outcome: Any) -> None:
            if isinstance(outcome, Exception):
                _settle(reply, error=from_wire(*to_wire(outcome)))
            else:
                self.note(receiver, sender, outcome)
                _settle(reply, value=outcome)

        self.later(sender, receiver, deliver, lambda: _settle(reply, error=dead))
        return reply

    def is_dead(self, system: System) -> bool:
        """Whether the process was killed; what still runs of it cannot send."""
        return system in self._dead

    def note(self, sender: str, receiver: str, message: Message) -> None:
        """One line of the trace."""
        now = round(asyncio.get_running_loop().time(), 9)
        self.trace.append((now, sender, receiver, type(message).__name__))
        for observe in self.observers:
            observe(sender, receiver, message)


class _View:
    def __init__(self, network: Network, sender: str, home: System) -> None:
        self._network = network
        self._sender = sender
        self._home = home

    def ref(self, name: str) -> _LinkRef:
        return _LinkRef(self._network, self._sender, self._home, name)


class _LinkRef:
    def __init__(self, network: Network, sender: str, home: System, name: str) -> None:
        self.name = name
        self._network = network
        self._sender = sender
        self._home = home

    def tell(self, message: Message) -> None:
        if not self._network.is_dead(self._home):
            self._network.send(self._sender, self.name, message)

    def ask(self, message: Any, *, block: bool = False, timeout: float) -> Awaitable[Any]:
        del block
        return self._within(message, timeout)

    def watch(self, watcher: Recipient) -> None:
        self._network.watch(self.name, watcher)

    async def _within(self, message: Any, timeout: float) -> Any:
        if self._network.is_dead(self._home):
            raise ActorDead(f"{self._sender} is dead")
        reply = self._network.ask(self._sender, self.name, message)
        try:
            async with asyncio.timeout(timeout):
                return await reply
        except TimeoutError:
            what = f"{self._sender} asked {self.name} {type(message).__name__}, {timeout} s"
            raise AskTimeout(what) from None


def _settle(
    reply: asyncio.Future[Any], *, value: Any = None, error: Exception | None = None
) -> None:
    if reply.done():
        return
    if error is not None:
        reply.set_exception(error)
    else:
        reply.set_result(value)


async def _outcome(asked: Awaitable[Any]) -> Any:
    try:
        return await asked
    except Exception as error:  # noqa: BLE001 - it travels back as the reply
        return error
