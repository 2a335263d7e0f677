"""In the place of torch's store and process group: the same calls, in memory.

A store that cannot be reached, and a group that breaks, raise what torch's do. When that is, and
how long a part travels, the `Fabric` says.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

import torch
from tests.simulation import threads
from tests.simulation.loop import current_process

from ratchet.errors import TransferFailed

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from tests.simulation.fabric import Fabric
    from tests.simulation.loop import Process

    from ratchet.transport.weights.deadline import Deadline


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


class Mesh:
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
