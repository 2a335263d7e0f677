"""One end of a broadcast transport: its thread, its store client, its staging memory, its group.

Consumes calls from the event loop and runs them on its thread, where alone the store and the group
are used. Waits there, for the other end, until a deadline; `abandon` unblocks whatever waits for
the store at once, and leaves an operation of the group to its deadline, with thread and memory of
its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from ratchet.errors import TransferFailed
from ratchet.transport.weights.finalize import NUM_STAGING
from ratchet.transport.weights.groups import (
    Deadline,
    GlooGroup,
    Group,
    NcclGroup,
    called,
    connect_store,
)
from ratchet.transport.weights.worker import Worker

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import TCPStore

T = TypeVar("T")
_FIRST_POLL_S: Final = 0.0002
_LAST_POLL_S: Final = 0.005


class Link:
    """What one end owns. Methods other than `run`, `abandon` and `close` belong to its thread."""

    def __init__(self, host: str, port: int, name: str) -> None:
        self.host, self.port = host, port
        self._worker = Worker(name)
        self._stopped = threading.Event()
        self._store: TCPStore | None = None
        self._address = host
        self._group: Group | None = None
        self._staging: list[torch.Tensor] = []

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
        self._worker.stop(last=self.leave)

    async def close(self, grace_s: float) -> None:
        """Drop the group; wait for it as long as `grace_s`, as a process that exits beside a live
        group may crash.
        """
        self._stopped.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.run(self.leave)
        self.abandon()

    @property
    def holds(self) -> str | None:
        """Name of the group that this end is in."""
        return None if self._group is None else self._group.name

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

    def enter(self, name: str, backend: str, rank: int, size: int, deadline: Deadline) -> Group:
        """Return the group of this name: the one held, or a new one in its place."""
        if self._group is None or self._group.name != name:
            self.leave()
            store = self.store(deadline)
            if backend == "nccl":
                self._group = NcclGroup(store, name, rank, size, deadline=deadline)
            else:
                self._group = GlooGroup(
                    store, name, rank, size, address=self._address, deadline=deadline
                )
        return self._group

    def staging(self, num_bytes: int) -> list[torch.Tensor]:
        """Return the staging buffers of the current group, each of at least `num_bytes`; kept from
        transfer to transfer, as fresh memory is slow.
        """
        group = self._group
        if group is not None and not (self._staging and len(self._staging[0]) >= num_bytes):
            self._staging = []
            self._staging = [group.allocate(num_bytes) for _ in range(NUM_STAGING)]
        return self._staging

    def leave(self) -> None:
        """Drop the group; peers that wait on it raise."""
        if self._group is not None:
            self._group.close()
        self._group = None
        self._staging = []
