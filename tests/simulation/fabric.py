"""The network of weight transfers: stores and process groups in memory, and what goes wrong there.

The product's sender and receivers run on it as they are, with the threads of their links
(`threads.py`): they meet at a `Store`, enter a `MemoryGroup`, and move buckets. What goes wrong is
what goes wrong with gloo: a member dies and its group breaks for all, one stands still until the
deadline of the others, a connection is lost between two buckets, a bit is flipped on the way.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from tests.simulation import threads
from tests.simulation.loop import Process, VirtualLoop, current_process

from ratchet.errors import TransferFailed
from ratchet.transport.weights import (
    gathering,
    groups,
    inbox,
    link,
    meeting,
    sender,
    worker,
)
from ratchet.transport.weights.groups import Deadline

_FIRST_POLL_S = 0.1
_POLL_S = 2.0
"""Longer than the product's own, so that waiting costs little."""
_HOST = "10.0.0.1"


class Store:
    """What the product uses of torch's store; a process that stands still answers nobody."""

    def __init__(self, fabric: Fabric, owner: Process | None) -> None:
        self.fabric = fabric
        self.owner = owner
        self._values: dict[str, bytes] = {}
        self._queues: defaultdict[str, deque[bytes]] = defaultdict(deque)
        self._timeout_s = 0.0

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def set(self, key: str, value: str) -> None:
        self._reach()
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._reach()
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        self._reach()
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> None:
        self._reach()
        self._values.pop(key, None)

    def queue_push(self, key: str, value: bytes) -> None:
        self._reach()
        self._queues[key].append(value)

    def queue_pop(self, key: str) -> bytes:
        self._reach()
        return self._queues[key].popleft()

    def queue_len(self, key: str) -> int:
        self._reach()
        return len(self._queues[key])

    def _reach(self) -> None:
        self.fabric.reach(self.owner, self._timeout_s)


class _Move:
    """One bucket, or the trailer, on its way through a group."""

    def __init__(self) -> None:
        self.data: torch.Tensor | None = None
        """what the root has sent"""
        self.arrived: set[int] = set()
        self.changed = threads.Waiters()


class _Mesh:
    """The connections of one group."""

    def __init__(self, size: int, *, eager: bool) -> None:
        self.size = size
        self.eager = eager
        """the root goes on when the part before this one has arrived"""
        self.members: dict[int, MemoryGroup] = {}
        self.broken = ""
        self.entered = threads.Waiters()
        self.moves: defaultdict[int, _Move] = defaultdict(_Move)

    def break_off(self, reason: str) -> None:
        """Every wait for it ends."""
        self.broken = self.broken or reason
        self.entered.wake()
        for move in self.moves.values():
            move.changed.wake()


class MemoryGroup:
    """A `Group` in memory, in the place of gloo's."""

    def __init__(
        self, store: Store, name: str, rank: int, size: int, *, address: str, deadline: Deadline
    ) -> None:
        self.name = name
        self.device = torch.device("cpu")
        self.process = current_process.get()
        self._fabric = store.fabric
        self._rank = rank
        self._next = 0
        self._mesh = mesh = self._fabric.mesh(name, size)
        assert mesh.size == size, f"{name} has {mesh.size} members, or {size}"
        assert rank not in mesh.members, f"rank {rank} of {name} came twice"
        mesh.members[rank] = self
        mesh.entered.wake()
        while len(mesh.members) < size and not mesh.broken and deadline.left_s:
            mesh.entered.park(deadline.left_s)
        if len(mesh.members) < size or mesh.broken:
            mesh.members.pop(rank, None)
            raise TransferFailed(mesh.broken or "connecting timed out")

    @property
    def root(self) -> Process | None:
        """Whose buckets they are."""
        return self._mesh.members[0].process

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def move(self, data: torch.Tensor, deadline: Deadline) -> Callable[[], None]:
        number = self._next
        self._next += 1
        mesh, move = self._mesh, self._mesh.moves[number]
        if self._rank == 0:
            move.data = data.clone()
        else:
            self._fabric.passes(self)
        move.changed.wake()

        def wait() -> None:
            while not mesh.broken and move.data is None and deadline.left_s:
                move.changed.park(deadline.left_s)
            if self._rank and move.data is not None and not mesh.broken:
                self._fabric.travel(self, deadline)
            if self._rank and move.data is not None and not mesh.broken and deadline.left_s:
                assert len(data) == len(move.data), "the two ends move different parts"
                data.copy_(self._fabric.changed(self, move.data))
                move.arrived.add(self._rank)
                move.changed.wake()
            here = mesh.moves[max(number - 1, 0)] if mesh.eager else move
            num_others = 0 if self._rank else mesh.size - 1
            while not mesh.broken and len(here.arrived) < num_others and deadline.left_s:
                here.changed.park(deadline.left_s)
            if mesh.broken or not deadline.left_s:
                raise TransferFailed(mesh.broken or f"{number} timed out")

        return wait

    def close(self) -> None:
        self._mesh.break_off("connection closed by peer")


class Failure(NamedTuple):
    """What an engine does wrong, once."""

    call: str
    """of the load, or "forget": it takes a write and does nothing"""
    known: bool
    """it says so; else its process ends of it"""


class Fabric:
    """What all trainers and engines of a world share."""

    def __init__(
        self,
        loop: VirtualLoop,
        seed: int,
        *,
        move_s: float,
        held_s: Callable[[str, str], float] = lambda *_: 0.0,
    ) -> None:
        """Make the network, and put it in the place of torch's until the loop is closed.

        Args:
            loop: where everything runs.
            seed: of delays, and of what is flipped.
            move_s: seconds that a bucket is on its way, on average.
            held_s: for how long the way between two processes is held back.
        """
        self.loop = loop
        self.sent: dict[int, Any] = {}
        """the weights of every version, as numpy arrays"""
        self.lose: set[str] = set()
        """engines (by name) that lose the trainer in their next transfer"""
        self.breaks: dict[str, int] = {}
        """engines whose connection breaks before so many parts of their next transfer"""
        self.corrupt: set[str] = set()
        """engines for which a bit is flipped"""
        self.failures: dict[str, Failure] = {}
        """by engine, what it does wrong next"""
        self.num_damaged = 0
        """loads that end in a difference, and should"""
        self.slow: dict[str, float] = {}
        """seconds that the next part takes on top"""
        self.moments: list[tuple[str, int, Callable[[], None]]] = []
        """(engine, part, what happens when that is asked for)"""
        self._move_s = move_s
        self._held_s = held_s
        self._rng = random.Random(f"fabric/{seed}")
        self._stores: dict[int, Store] = {}
        self._meshes: dict[str, _Mesh] = {}
        self._parts: dict[Process | None, int] = {}
        """how many parts an engine has asked for in this transfer"""
        self._lost: set[Process | None] = set()
        """engines that reach nobody until their transfer has ended"""
        loop.at_close += [self._put_in(), lambda: threads.end_all(loop)]

    # --- in the place of torch's

    def serve(self, host: str) -> tuple[Store, str, int]:
        """As `store.serve_store`."""
        port = len(self._stores) + 1
        self._stores[port] = Store(self, current_process.get())
        return self._stores[port], _HOST, port

    def connect(
        self, host: str, port: int, deadline: Deadline, check: Callable[[], None]
    ) -> tuple[Store, str]:
        """As `store.connect_store`."""
        check()
        try:
            self.reach(self._stores[port].owner, deadline.left_s)
        except RuntimeError as error:
            raise TransferFailed(f"no trainer serves weights at {host}:{port}: {error}") from None
        return self._stores[port], _HOST

    def mesh(self, name: str, size: int) -> _Mesh:
        """Return the connections of a group."""
        if name not in self._meshes:
            self._meshes[name] = _Mesh(size, eager=self._rng.random() < 0.5)
        return self._meshes[name]

    def reach(self, owner: Process | None, timeout_s: float) -> None:
        """Return when a store has been reached.

        Raises:
            RuntimeError: as torch's.
        """
        asks = current_process.get()
        until = threads.now() + timeout_s
        while owner is not asks:
            if owner is not None and owner.dead:
                raise RuntimeError("connection reset by peer")
            if asks in self._lost:
                raise RuntimeError("no route to host")
            if self._apart_s(asks, owner) <= 0 and (owner is None or owner.runs):
                return
            if threads.now() >= until:
                raise RuntimeError("timed out")
            threads.sleep(min(_POLL_S, until - threads.now()))

    # --- what goes wrong

    def begin(self, process: Process | None) -> None:
        """An engine takes part in another transfer."""
        self._parts[process] = 0
        self._lost.discard(process)

    def end(self, process: Process | None) -> None:
        """It does no more."""
        self._lost.discard(process)

    def bury(self, process: Process) -> None:
        """A process has died: its groups break."""
        for mesh in self._meshes.values():
            if not mesh.broken and process in {g.process for g in mesh.members.values()}:
                mesh.break_off("connection reset by peer")

    def passes(self, group: MemoryGroup) -> None:
        """An engine asks for the next part: now is the time of what waits for it."""
        assert group.process is not None
        name, part = group.process.name, self._parts.get(group.process, 0)
        self._parts[group.process] = part + 1
        if name in self.lose:
            self.lose.discard(name)
            self._lost.add(group.process)
            group.close()
        if self.breaks.get(name, part + 1) <= part:
            del self.breaks[name]
            group.close()
        for moment in [m for m in self.moments if m[0] == name and m[1] <= part]:
            self.moments.remove(moment)
            self.loop.call_in(None, 0.0, moment[2])

    def travel(self, group: MemoryGroup, deadline: Deadline) -> None:
        """Take the time that a part takes to an engine."""
        assert group.process is not None
        seconds = min(self._rng.expovariate(1 / self._move_s), 4 * self._move_s)
        seconds += self.slow.pop(group.process.name, 0.0)
        seconds = max(seconds, self._apart_s(group.process, group.root))
        threads.sleep(min(seconds, deadline.left_s))

    def changed(self, group: MemoryGroup, data: torch.Tensor) -> torch.Tensor:
        """Return what arrives of a part."""
        assert group.process is not None
        if group.process.name not in self.corrupt:
            return data
        self.corrupt.discard(group.process.name)
        self.num_damaged += 1
        data = data.clone()
        data[self._rng.randrange(4)] ^= 1 << self._rng.randrange(8)
        return data

    def _apart_s(self, one: Process | None, other: Process | None) -> float:
        if one is None or other is None:
            return 0.0
        return max(self._held_s(one.name, other.name), self._held_s(other.name, one.name))

    def _put_in(self) -> Callable[[], None]:
        stack = ExitStack()
        ids = (SimpleNamespace(hex=f"{number:08x}") for number in itertools.count())
        names: list[tuple[Any, str, Any]] = [
            (asyncio, "to_thread", threads.to_thread),
            (worker, "threading", threads),
            (worker, "SimpleQueue", threads.SimpleQueue),
            (worker, "_stopped", set()),
            (link, "threading", threads),
            (link, "GlooGroup", MemoryGroup),
            (link, "connect_store", self.connect),
            (link, "_FIRST_POLL_S", _FIRST_POLL_S),
            (link, "_LAST_POLL_S", _POLL_S),
            (gathering, "threading", threads),
            (gathering, "monotonic", threads.now),
            (gathering, "perf_counter", threads.now),
            (gathering, "_POLL_S", _POLL_S),
            (inbox, "threading", threads),
            (meeting, "monotonic", threads.now),
            (groups, "time", SimpleNamespace(monotonic=threads.now, sleep=threads.sleep)),
            (sender, "serve_store", self.serve),
            (sender, "uuid", SimpleNamespace(uuid4=lambda: next(ids))),
        ]
        for owner, name, value in names:
            stack.enter_context(patch.object(owner, name, value))
        return stack.close
