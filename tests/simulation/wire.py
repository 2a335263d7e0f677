"""Connections between simulated processes: bytes that take their time, and what can go wrong.

Implements the `Wire` of the mailbox transport, so that nodes and their sessions run as they are.
A connection is ordered and loses nothing while it lives, as TCP. What goes wrong is what goes wrong
with TCP: bytes are late, or held back on a cut path until it heals; a reader is slow and its writer
has to pause; a connection is lost in the middle of a frame; a process dies, and what it had written
arrives in part, and then the end; nobody listens at an address; a dial hangs.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from tests.simulation.loop import Process, VirtualLoop, current_process

from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.wire import Listener

_HIGH_BYTES = 1 << 16
"""What may be under way before a writer has to pause."""


class End(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, wire: SimulatedWire, process: Process, protocol: Any) -> None:
        super().__init__()
        self.process = process
        self.protocol = protocol
        self.far: End
        self.made = False
        self._wire = wire
        self._open = True
        self._under_way = 0
        self._paused = False
        self.written_until = 0.0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return not self._open

    def write(self, data: Any) -> None:
        if not self._open:
            return
        whole = bytes(data)
        self._under_way += len(whole)
        self._at_far(lambda: self.far.arrive(whole), len(whole))
        if self._under_way > _HIGH_BYTES and not self._paused:
            self._paused = True
            self.protocol.pause_writing()

    def close(self) -> None:
        """What was written arrives; then the other end hears the end."""
        if self._open:
            self._open = False
            self._at_far(lambda: self.far.lose(None), 0)
            self._wire.loop.call_in(self.process, 0.0, self.lose, None)

    def abort(self) -> None:
        self.break_off()
        self._wire.loop.call_in(self.process, 0.0, self.lose, None)

    def break_off(self) -> None:
        """Nothing more arrives, and the other end hears the end: in the middle of what is under
        way.
        """
        self._open = False
        self.written_until = max(self.written_until, self._wire.loop.now)
        self._wire.loop.call_in(
            self.far.process, self._wire.delay(self.process, self.far.process), self.far.lose, None
        )

    def _at_far(self, action: Callable[[], None], num_bytes: int) -> None:
        loop = self._wire.loop
        at = loop.now + self._wire.delay(self.process, self.far.process, num_bytes)
        # strictly later: what is written first arrives first
        self.written_until = max(self.written_until + 1e-7, at)
        loop.call_in(self.far.process, self.written_until - loop.now, action)

    def arrive(self, data: bytes) -> None:
        """Hand the bytes to the protocol, in pieces of any size."""
        if self._wire.rng.random() < 0.2 and len(data) > 1:
            middle = self._wire.rng.randrange(1, len(data))
            self._feed(data[:middle])
            self._feed(data[middle:])
        else:
            self._feed(data)
        self._wire.loop.call_in(self.far.process, 0.0, self.far.taken, len(data))

    def _feed(self, data: bytes) -> None:
        while data and self.protocol is not None and self.made:
            room = self.protocol.get_buffer(-1)
            taken = min(len(room), len(data))
            room[:taken] = data[:taken]
            self.protocol.buffer_updated(taken)
            data = data[taken:]

    def taken(self, num_bytes: int) -> None:
        """The other end has read so much."""
        self._under_way -= num_bytes
        if self._paused and self._under_way <= _HIGH_BYTES // 2:
            self._paused = False
            if self.protocol is not None:
                self.protocol.resume_writing()

    def make(self) -> None:
        """Tell the protocol that the connection is there."""
        self.made = True
        self.protocol.connection_made(self)

    def lose(self, error: Exception | None) -> None:
        """Tell the protocol that the connection is gone; once."""
        self._open = False
        self._wire.ends.discard(self)
        if self.protocol is not None:
            protocol, self.protocol = self.protocol, None
            if self.made:
                protocol.connection_lost(error)


class _Door:
    def __init__(self, wire: SimulatedWire, address: Address, process: Process) -> None:
        self._wire = wire
        self._process = process
        self.address = address

    def close(self) -> None:
        owner, _ = self._wire.doors.get(self.address, (None, None))
        if owner is self._process:  # and not a later one that took the place
            del self._wire.doors[self.address]


class SimulatedWire:
    """The network between all processes of a world."""

    def __init__(
        self,
        loop: VirtualLoop,
        seed: int,
        *,
        mean_delay_s: float,
        tail: tuple[float, float],
        most_s: float,
    ) -> None:
        self.loop = loop
        self.rng = random.Random(f"wire/{seed}")
        self.doors: dict[Address, tuple[Process, Callable[[], asyncio.BaseProtocol]]] = {}
        self.ends = _Ends()
        self.bytes_per_s: dict[str, float] = {}
        """of processes that read slowly, by name"""
        self._mean_delay_s = mean_delay_s
        self._tail = tail
        self._most_s = most_s  # what is later is not late but silent, and a fault of its own
        self._held_until: defaultdict[tuple[str, str], float] = defaultdict(float)

    # --- what a node asks for

    async def listen(
        self, address: Address, accept: Callable[[], asyncio.BaseProtocol]
    ) -> Listener:
        process = current_process.get()
        assert process is not None
        self.doors[address] = (process, accept)
        return _Door(self, address, process)

    async def dial(self, address: Address, protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        here = current_process.get()
        assert here is not None
        await self._sleep(self._mean_delay_s)
        if address not in self.doors:
            raise ConnectionRefusedError(f"nobody is at {address}")
        there, accept = self.doors[address]
        wait_s = self._held_until[here.name, there.name] - self.loop.now
        if wait_s > 0:
            await self._sleep(wait_s)
            if address not in self.doors:
                raise ConnectionRefusedError(f"nobody is at {address} any more")
            there, accept = self.doors[address]
        near = End(self, here, protocol())
        # the kernel of the other host takes the connection, whatever its process does
        self.loop.call_in(there, self._mean_delay_s, self._accept, near, there, accept)
        far = near.far = End(self, there, None)
        far.far = near
        near.written_until = self.loop.now + self._mean_delay_s  # no byte is there before it
        self.ends.add(near)
        self.ends.add(far)
        near.make()

    def _accept(
        self, near: End, there: Process, accept: Callable[[], asyncio.BaseProtocol]
    ) -> None:
        far = near.far
        if far in self.ends and far.protocol is None and not far.is_closing():
            far.protocol = accept()
            far.make()

    async def _sleep(self, seconds: float) -> None:
        woken: asyncio.Future[None] = self.loop.create_future()
        self.loop.call_in(
            current_process.get(), seconds, lambda: woken.done() or woken.set_result(None)
        )
        await woken

    # --- time, and trouble

    def delay(self, sender: Process, receiver: Process, num_bytes: int = 0) -> float:
        """Seconds until something arrives that is sent now."""
        delay_s = self.rng.expovariate(1 / self._mean_delay_s)
        if self.rng.random() < self._tail[0]:
            delay_s += self.rng.expovariate(1 / self._tail[1])
        if receiver.name in self.bytes_per_s:
            delay_s += num_bytes / self.bytes_per_s[receiver.name]
        delay_s = min(delay_s, self._most_s)
        held_s = self._held_until[sender.name, receiver.name] - self.loop.now
        return delay_s + max(0.0, held_s)

    def hold(self, sender: str, receiver: str, seconds: float) -> None:
        """Hold back what is sent from now on: sent again and again until the path is whole."""
        self._held_until[sender, receiver] = self.loop.now + seconds

    def heal(self, name: str) -> None:
        """Make the paths of a process whole for what is sent from now on."""
        for path in self._held_until:
            if name in path:
                self._held_until[path] = self.loop.now

    def held_s(self, sender: str, receiver: str) -> float:
        """For how long what is sent is still held back."""
        return self._held_until.get((sender, receiver), 0.0) - self.loop.now

    def cut(self, name: str) -> None:
        """Lose every connection of a process, in the middle of whatever is under way."""
        for end in self.ends.of(name):
            end.break_off()
            end.far.break_off()
            self.loop.call_in(end.process, 0.0, end.lose, ConnectionResetError("cut"))

    def bury(self, process: Process) -> None:
        """A process has died: its doors and its connections go with it."""
        for address, (owner, _) in tuple(self.doors.items()):
            if owner is process:
                del self.doors[address]
        for end in self.ends.of(process.name):
            if end.process is not process:
                continue
            if self.rng.random() < 0.5:
                end.break_off()
            else:
                end.close()
            self.ends.discard(end)


class _Ends:
    """The open ends, in order."""

    def __init__(self) -> None:
        self._ends: dict[End, None] = {}

    def __contains__(self, end: End) -> bool:
        return end in self._ends

    def add(self, end: End) -> None:
        self._ends[end] = None

    def discard(self, end: End) -> None:
        self._ends.pop(end, None)

    def of(self, name: str) -> list[End]:
        return [end for end in self._ends if end.process.name == name]
