"""Links between simulated processes: a message arrives after a random delay, in order per link.

Every process has a `System` of its own, whose `remote` is this network seen from there. Each
delivery is a line of the trace, so that two runs can be compared event by event.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

from ratchet.actors.system import System
from ratchet.errors import ActorDead, AskTimeout, from_wire, to_wire
from ratchet.messages import Down, Message
from ratchet.transport.mailbox.base import Recipient


class Network:
    """Delivers between systems, kills and restarts processes."""

    def __init__(self, seed: int, *, mean_delay_s: float = 0.002) -> None:
        self.trace: list[tuple[float, str, str, str]] = []
        self.observers: list[Callable[[str, Message], None]] = []
        self._rng = random.Random(seed)
        self._mean_delay_s = mean_delay_s
        self._arrivals: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._systems: dict[str, System] = {}
        self._watchers: defaultdict[str, list[Recipient]] = defaultdict(list)

    def attach(self, name: str, system: System) -> None:
        """Connect a process that hosts the actor of this name."""
        system.remote = _View(self, name, system)
        self._systems[name] = system

    def kill(self, name: str, reason: str = "killed") -> None:
        """Cut a process off for good, and tell whoever watches. Idempotent."""
        system = self._systems.pop(name, None)
        if system is None:
            return
        system.abort()
        for watcher in self._watchers.pop(name, []):
            self.later(name, watcher.name, lambda w=watcher: w.tell(Down(name, reason)))

    def later(self, sender: str, receiver: str, action: Callable[[], None]) -> None:
        """Act after the delay of one message, behind all earlier ones of the link."""
        loop = asyncio.get_running_loop()
        delay = self._rng.expovariate(1 / self._mean_delay_s)
        # strictly later: timers of the same instant have no order of their own
        at = max(self._arrivals[sender, receiver] + 1e-6, loop.time() + delay)
        self._arrivals[sender, receiver] = at
        loop.call_at(at, action)

    def note(self, sender: str, receiver: str, message: Message) -> None:
        """One line of the trace."""
        now = round(asyncio.get_running_loop().time(), 9)
        self.trace.append((now, sender, receiver, type(message).__name__))
        for observe in self.observers:
            observe(receiver, message)

    def system(self, name: str) -> System | None:
        """The process that hosts an actor now."""
        return self._systems.get(name)

    def watch(self, name: str, watcher: Recipient) -> None:
        """Remember a watch."""
        self._watchers[name].append(watcher)


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
        self._network.later(self._sender, self.name, lambda: self._deliver(message))

    def ask(self, message: Any, *, block: bool = False, timeout: float) -> Awaitable[Any]:
        del block
        reply = asyncio.get_running_loop().create_future()
        self._network.later(self._sender, self.name, lambda: self._deliver_ask(message, reply))
        return self._within(reply, message, timeout)

    def watch(self, watcher: Recipient) -> None:
        self._network.watch(self.name, watcher)

    def _alive(self) -> bool:
        return self._network.system(self._sender) is self._home

    def _deliver(self, message: Message) -> None:
        system = self._network.system(self.name)
        if system is not None and self._alive():
            self._network.note(self._sender, self.name, message)
            system.ref(self.name).tell(message)

    def _deliver_ask(self, message: Message, reply: asyncio.Future[Any]) -> None:
        system = self._network.system(self.name)
        if system is None or not self._alive():
            self._settle(reply, error=ActorDead(f"there is no actor {self.name}"))
            return
        self._network.note(self._sender, self.name, message)
        asked = asyncio.ensure_future(
            _outcome(system.ref(self.name).ask(message, block=False, timeout=3600))
        )
        asked.add_done_callback(lambda done: self._send_back(done.result(), reply))

    def _send_back(self, outcome: Any, reply: asyncio.Future[Any]) -> None:
        def arrive() -> None:
            if isinstance(outcome, Exception):
                self._settle(reply, error=from_wire(*to_wire(outcome)))
            else:
                self._network.note(self.name, self._sender, outcome)
                self._settle(reply, value=outcome)

        self._network.later(self.name, self._sender, arrive)

    def _settle(
        self, reply: asyncio.Future[Any], *, value: Any = None, error: Exception | None = None
    ) -> None:
        if reply.done():
            return
        if error is not None:
            reply.set_exception(error)
        else:
            reply.set_result(value)

    async def _within(self, reply: asyncio.Future[Any], message: Any, timeout: float) -> Any:
        try:
            async with asyncio.timeout(timeout):
                return await reply
        except TimeoutError:
            what = f"{self._sender} asked {self.name} {type(message).__name__}, {timeout} s"
            raise AskTimeout(what) from None


async def _outcome(asked: Awaitable[Any]) -> Any:
    try:
        return await asked
    except Exception as error:  # noqa: BLE001 - it travels back as the reply
        return error
