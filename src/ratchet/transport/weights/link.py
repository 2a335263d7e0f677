"""One end of one group: its thread, its store client, its staging memory, the group itself.

Consumes calls from the event loop and runs them on its thread, where alone the store and the group
are used. Waits there, for the other end, until a deadline; `abandon` unblocks whatever waits for
the store at once, and leaves an operation of the group to its deadline, with thread and memory of
its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from ratchet.errors import TransferFailed
from ratchet.transport.weights.deadline import Deadline
from ratchet.transport.weights.groups import GlooGroup, Group, NcclGroup, called
from ratchet.transport.weights.outside import OutsideGroup
from ratchet.transport.weights.shared import SharedRing
from ratchet.transport.weights.shared_reader import SharedReader
from ratchet.transport.weights.staging import Staging
from ratchet.transport.weights.store import connect_store
from ratchet.transport.weights.worker import Worker

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import TCPStore

T = TypeVar("T")
_FIRST_POLL_S: Final = 0.0002
_LAST_POLL_S: Final = 0.005


class Link:
    """What one end owns. Methods belong to its thread, but for `run`, `hand_over`, `abandon` and
    `close`.
    """

    def __init__(self, host: str, port: int, name: str, device: torch.device) -> None:
        """Own nothing yet.

        Args:
            host: the numeric address of the trainer's store.
            port: its port.
            name: of the thread.
            device: where NCCL moves buckets; a thread of its own does not know the caller's.
        """
        self.host, self.port = host, port
        self._device = device
        self._worker = Worker(name)
        self._stopped = threading.Event()
        self._store: TCPStore | None = None
        self._address = host
        self._group: Group | None = None
        self.members: tuple[str, ...] = ()
        """at the trainer's end: the engines of the group, by rank from rank 1"""
        self.ring: SharedRing | None = None
        """what the trainer's end of the lane of its own host shares"""
        self.reader = SharedReader()
        """an engine's way to that"""
        self._staging = Staging()

    def run(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Run a blocking call on the link's thread; an error drops the group."""

        def guarded() -> T:
            done = False
            try:
                result = call()
                done = True
            finally:
                if not done:
                    self.leave()
            return result

        return self._worker.run(guarded)

    def abandon(self) -> None:
        """Give everything up, without waiting; the thread drops the group as soon as it can."""
        self._stopped.set()
        self._worker.stop(last=self._free)

    async def close(self, grace_s: float) -> None:
        """Drop the group; wait for it as long as `grace_s`, as a process that exits beside a live
        group may crash.
        """
        self._stopped.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.run(self._free)
        self.abandon()

    @property
    def holds(self) -> str | None:
        """Name of the group that this end is in."""
        return None if self._group is None else self._group.name

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody wants what this end does any more."""
        return self._stopped.is_set()

    def check(self) -> None:
        """Return if the link is not abandoned.

        Raises:
            TransferFailed: if it is.
        """
        if self._stopped.is_set():
            msg = "the transfer was given up"
            raise TransferFailed(msg)

    def store(self, deadline: Deadline) -> TCPStore:
        """Return the client, connected by the deadline."""
        if self._store is None:
            self._store, self._address = connect_store(self.host, self.port, deadline, self.check)
        self._store.set_timeout(deadline.left)
        return self._store

    def until(self, condition: Callable[[], bool], deadline: Deadline) -> bool:
        """Poll; return False when the deadline passes first.

        torch's own blocking waits cannot be interrupted, and warn on stderr when they time out.

        Raises:
            TransferFailed: if the link was abandoned, or the store is gone.
        """
        pause = _FIRST_POLL_S
        while not called(condition):
            self._stopped.wait(min(pause, deadline.left_s))
            self.check()
            if not deadline.left_s:
                return False
            pause = min(pause * 1.5, _LAST_POLL_S)
        return True

    def enter_outside(
        self, name: str, backend: str, sizes: Sequence[int], deadline: Deadline
    ) -> Group:
        """Return the group of servers that bring so many ranks each, at the trainer's end: the one
        held, or a new one in its place.
        """
        if self._group is None or self._group.name != name:
            self.leave()
            self._group = OutsideGroup(
                self.store(deadline),
                name,
                sizes,
                backend=backend,
                address=self._address,
                device=self._device,
                deadline=deadline,
            )
        return self._group

    def enter(self, name: str, backend: str, rank: int, size: int, deadline: Deadline) -> Group:
        """Return the group of this name: the one held, or a new one in its place."""
        if self._group is None or self._group.name != name:
            self.leave()
            store = self.store(deadline)
            if backend == "nccl":
                self._group = NcclGroup(
                    store, name, rank, size, device=self._device, deadline=deadline
                )
            else:
                self._group = GlooGroup(
                    store, name, rank, size, address=self._address, deadline=deadline
                )
        return self._group

    def staging(self, sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
        """Return the staging buffers. They outlive the group, as a load that goes on in another one
        still holds what arrived in the last.
        """
        return self._staging.buffers(sizes, device)

    def hand_over(self) -> Callable[[], None]:
        """Part with the staging buffers, on the event loop, when everything has arrived; see
        `Staging.hand_over`.
        """
        return self._staging.hand_over()

    def leave(self) -> None:
        """Drop the group; peers that wait on it raise."""
        if self._group is not None:
            self._group.close()
        self._group = None
        self.members = ()

    def _free(self) -> None:
        self.leave()
        self._staging.free()
        self.reader.leave()
        if self.ring is not None:
            self.ring.close()
