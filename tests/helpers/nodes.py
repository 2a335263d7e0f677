"""What tests of the mailbox transport share: a remembering actor, nodes, a network in memory."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.helpers.actors import RecordingLog

from ratchet.messages import Message
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.base import Recipient, Trace, current_trace
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.node import Node
from ratchet.transport.mailbox.reader import FrameReader
from ratchet.transport.mailbox.wire import Listener, Wire

KEY = bytes(range(32))
DEFAULT_LIMITS = Limits()


def feed(reader: FrameReader, data: bytes | bytearray) -> list[bytes]:
    """Write `data` into a reader; return copies of the frames that it completes."""
    frames = []
    while data:
        room = reader.buffer()
        taken = min(len(room), len(data))
        room[:taken] = data[:taken]
        data = data[taken:]
        frames += [bytes(view) for view in reader.written(taken)]
    return frames


class Inbox:
    """An actor of this process: keeps what it is told, answers by `answer`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.told: list[Any] = []
        self.traces: list[Trace | None] = []
        self.watchers: list[Recipient] = []
        self.answer: Callable[[Any], Any] | None = None
        self._changed = asyncio.Event()

    def tell(self, message: Message) -> None:
        self.told.append(message)
        self.traces.append(current_trace.get())
        self._changed.set()

    def ask(self, message: Any, *, block: bool = False, timeout: float = 0.0) -> Any:
        self.told.append(message)
        self.traces.append(current_trace.get())
        self._changed.set()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.answer is not None:
            answer = self.answer(message)
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        return future

    def watch(self, watcher: Recipient) -> None:
        self.watchers.append(watcher)

    async def until(self, condition: Callable[[list[Any]], bool]) -> list[Any]:
        """Wait until what it was told meets a condition."""
        while not condition(self.told):
            self._changed.clear()
            await self._changed.wait()
        return self.told

    async def has(self, count: int) -> list[Any]:
        """Wait until it was told so many messages."""
        return await self.until(lambda told: len(told) >= count)


class Letters:
    """Dead letters, as (receiver, message, reason)."""

    def __init__(self) -> None:
        self.all: list[tuple[str, Any, str]] = []

    def record(self, *, sender: str | None, receiver: str, message: Any, reason: str) -> None:
        self.all.append((receiver, message, reason))


def is_visitor(name: str) -> bool:
    """Tell whether a name of these tests is one of somebody without a door."""
    return name.startswith("visitor")


class Host:
    """A node with one actor of the same name: one life of a process."""

    def __init__(self, town: Town, name: str, life: int, **kwargs: Any) -> None:
        ids = itertools.count()
        self.inbox = Inbox(name)
        self.letters = Letters()
        self.log = RecordingLog()
        self.node = Node(
            **{
                "name": name,
                "incarnation": f"{name}/{life}",
                "address": None if is_visitor(name) else town.place(name),
                "key": KEY,
                "run_id": "run",
                "local": lambda wanted: self.inbox if wanted == name else None,
                "locate": town.locate,
                "dead_letters": self.letters,
                "new_id": lambda: f"{name}/{life}/{next(ids)}",
                "random_bytes": random.Random(f"{name}/{life}").randbytes,
                "log": self.log,
                "limits": town.limits,
                "wire": town.wire,
                **kwargs,
            }
        )

    def kill(self) -> None:
        """End as a killed process does: sockets close, nothing is said."""
        node = self.node
        node._closed = True
        if node._ticker is not None:
            node._ticker.cancel()
        if node._listener is not None:
            node._listener.close()
        for peer in node._peers.values():
            peer._out.connection = None
            peer._dialler._stopped = True
        for connection in tuple(node._connections):
            connection.abort()


class Town:
    """Nodes that find each other."""

    def __init__(
        self,
        place: Callable[[str], Address],
        limits: Limits = DEFAULT_LIMITS,
        wire: Wire | None = None,
    ) -> None:
        self.place = place
        self.limits = limits
        self.wire = wire
        self.hosts: dict[str, Host] = {}
        self._lives = itertools.count(1)

    def locate(self, name: str) -> Address:
        address = self.hosts[name].node.address
        if address is None:
            raise LookupError(f"{name} has no door")
        return address

    def build(self, name: str, **kwargs: Any) -> Host:
        """A new life of a name, not started yet."""
        self.hosts[name] = Host(self, name, next(self._lives), **kwargs)
        return self.hosts[name]

    async def start(self, name: str, **kwargs: Any) -> Host:
        host = self.build(name, **kwargs)
        await host.node.start()
        return host

    async def stop(self) -> None:
        for host in self.hosts.values():
            await host.node.stop(1.0)


class _MemoryTransport(asyncio.Transport):
    """One end of a connection in memory. Bytes arrive in later turns of the loop, in order."""

    def __init__(self, protocol: Any) -> None:
        super().__init__()
        self.protocol = protocol
        self.far: _MemoryTransport
        self._loop = asyncio.get_running_loop()
        self._open = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return not self._open

    def write(self, data: Any) -> None:
        if self._open:
            self._loop.call_soon(self.far._arrive, bytes(data))

    def _arrive(self, data: bytes) -> None:
        while data and self._open:
            room = self.protocol.get_buffer(-1)
            taken = min(len(room), len(data))
            room[:taken] = data[:taken]
            self.protocol.buffer_updated(taken)
            data = data[taken:]

    def close(self) -> None:
        if self._open:
            self._loop.call_soon(self.far._lose)
            self._loop.call_soon(self._lose)
            self._open = False

    def abort(self) -> None:
        self.close()

    def _lose(self) -> None:
        self._open = False
        if self.protocol is not None:
            protocol, self.protocol = self.protocol, None
            protocol.connection_lost(None)


class _MemoryListener:
    def __init__(self, wire: MemoryWire, address: Address) -> None:
        self._wire = wire
        self.address = address

    def close(self) -> None:
        self._wire.accepts.pop(self.address, None)


class MemoryWire:
    """A network in memory, for virtual time."""

    def __init__(self) -> None:
        self.accepts: dict[Address, Callable[[], asyncio.BaseProtocol]] = {}
        self.unreachable: set[Address] = set()
        """dials to these end in nothing, as to a host that is down"""
        self.num_dials = 0
        self._ends: list[_MemoryTransport] = []

    async def listen(
        self, address: Address, accept: Callable[[], asyncio.BaseProtocol]
    ) -> Listener:
        self.accepts[address] = accept
        return _MemoryListener(self, address)

    async def dial(self, address: Address, protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        self.num_dials += 1
        if address in self.unreachable:
            await asyncio.Event().wait()
        if address not in self.accepts:
            raise ConnectionRefusedError(f"nobody is at {address}")
        here, there = _MemoryTransport(protocol()), _MemoryTransport(self.accepts[address]())
        here.far, there.far = there, here
        self._ends += [here, there]
        there.protocol.connection_made(there)
        here.protocol.connection_made(here)

    def cut(self) -> None:
        """Lose every connection."""
        for end in self._ends:
            end.abort()
        self._ends.clear()


def memory_town(limits: Limits = DEFAULT_LIMITS) -> Town:
    """A town for virtual time."""
    return Town(lambda name: Address("unix", f"/{name}"), limits, MemoryWire())


@asynccontextmanager
async def stopping(town: Town) -> AsyncIterator[Town]:
    """Stop every node at the end."""
    try:
        yield town
    finally:
        await town.stop()
