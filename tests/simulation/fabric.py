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
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

from tests.simulation import threads
from tests.simulation.loop import Process, VirtualLoop, current_process
from tests.simulation.memory_groups import MemoryGroup, Mesh, Store

from ratchet.errors import TransferFailed
from ratchet.transport.weights import (
    deadline,
    gathering,
    inbox,
    link,
    meeting,
    sender,
    worker,
)
from ratchet.transport.weights.deadline import Deadline

if TYPE_CHECKING:
    import torch

_FIRST_POLL_S = 0.1
_POLL_S = 2.0
"""Longer than the product's own, so that waiting costs little."""
_HOST = "10.0.0.1"


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
        self._meshes: dict[str, Mesh] = {}
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

    def mesh(self, name: str, size: int) -> Mesh:
        """Return the connections of a group."""
        if name not in self._meshes:
            self._meshes[name] = Mesh(size, eager=self._rng.random() < 0.5)
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
            (worker, "_wake_quietly", lambda: None),  # all of them run on the thread of the test
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
            (deadline, "time", SimpleNamespace(monotonic=threads.now)),
            (sender, "serve_store", self.serve),
            (sender, "uuid", SimpleNamespace(uuid4=lambda: next(ids))),
        ]
        for owner, name, value in names:
            stack.enter_context(patch.object(owner, name, value))
        return stack.close
