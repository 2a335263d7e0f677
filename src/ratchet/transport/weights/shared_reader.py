"""Buckets through memory that the trainer shares: the engine's end, one transfer after another.

Consumes what the trainer says at its door, produces buckets in an inbox, which are verified and
written from where they lie. Waits on the thread of its link: for the trainer until the deadline, an
abandoned link or the trainer's end, for the engine until the deadline.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from ratchet.errors import TransferFailed
from ratchet.transport.weights.buckets import host_bytes
from ratchet.transport.weights.deadline import Deadline
from ratchet.transport.weights.digest import trailer_bytes
from ratchet.transport.weights.finalize import Arrived
from ratchet.transport.weights.plan import slots_by_bucket
from ratchet.transport.weights.shared_door import POLL_MS, ROOM, SAYS, knock, name_of
from ratchet.transport.weights.shared_segment import HELLO_BYTES, SeenSegment
from ratchet.transport.weights.staging import NUM_STAGING

if TYPE_CHECKING:
    import torch

    from ratchet.transport.weights.inbox import Inbox
    from ratchet.types import WeightManifest

_COPIED_BYTES: Final = 2**20
"""What is copied before it is read: far less than the cache holds."""

_GONE: Final = "the trainer goes on without this engine, or is gone"


class SharedReader:
    """An engine's end. Belongs to one thread."""

    def __init__(self) -> None:
        self._conn: socket.socket | None = None
        self._segment: SeenSegment | None = None
        """kept from transfer to transfer, as mapping it is slow"""

    def knock(self, address: str, transfer: str, rank: int, deadline: Deadline) -> None:
        """Ask to take part in a transfer.

        Raises:
            OSError: if the trainer is not on this host, or belongs to another user.
        """
        self.hang_up()
        self._conn = knock(address, name_of(transfer, rank), max(deadline.left_s, 0.001))

    def receive(
        self,
        manifest: WeightManifest,
        inbox: Inbox,
        staging: Sequence[torch.Tensor] | None,
        deadline: Deadline,
        check: Callable[[], None],
    ) -> None:
        """Take everything, and hand it over as it comes; in use until `finish`.

        Args:
            manifest: the plan of the transfer.
            inbox: takes the buckets.
            staging: memory for all of them. Without, they are handed over where they lie.
            deadline: for each wait.
            check: called while it waits; may raise.

        Raises:
            TransferFailed: if the trainer hung up, the deadline passed, or from `check`.
            EngineStuck: if the engine took too long.
        """
        segment = self._attach(deadline, check)
        for _ in staging[:NUM_STAGING] if staging is not None else ():
            self._give_room()
        buckets = zip(slots_by_bucket(manifest), manifest.bucket_bytes, strict=True)
        for part, (slots, size) in enumerate(buckets):
            if staging is None:
                inbox.wait_for_room(deadline)
                self._give_room()
            slot, end = self._expect(part, deadline, check)
            bucket = segment.slots[slot][:size]
            ends = self._ends(part, size, end, deadline, check)
            if staging is not None:
                own = staging[part][:size]
                arrived = Arrived.inspect(own, slots, _copied(own, bucket, ends))
                self._give_room()
            else:
                arrived = Arrived.inspect(bucket, slots, ends)
            inbox.put_bucket(arrived)
        self._expect(len(manifest.bucket_bytes), deadline, check)
        inbox.put_trailer(bytes(host_bytes(segment.trailer[: trailer_bytes(manifest)])))

    def finish(self, inbox: Inbox, deadline: Deadline) -> None:
        """Wait until the last buckets are free, and say so. Those that were copied are.

        Raises:
            EngineStuck: if the engine took too long.
        """
        if self._conn is not None:
            try:
                for _ in range(0 if inbox.is_whole else NUM_STAGING):
                    inbox.wait_for_room(deadline)
            finally:
                self.hang_up()

    def hang_up(self) -> None:
        """Say that the memory is not read any more."""
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()

    def leave(self) -> None:
        """Hang up, and give the memory back."""
        self.hang_up()
        self._segment = None

    def _attach(self, deadline: Deadline, check: Callable[[], None]) -> SeenSegment:
        conn = self._wait(deadline, check)
        try:
            hello, fds, _, _ = socket.recv_fds(conn, HELLO_BYTES, 1)
            if not fds:
                raise TransferFailed(_GONE)
            with os.fdopen(fds[0], "rb") as memory:
                if self._segment is None or not self._segment.is_of(memory.fileno()):
                    self._segment = None  # before the next one: not both at once
                    self._segment = SeenSegment(hello, memory.fileno())
        except OSError as error:
            msg = f"the trainer's shared memory cannot be used: {error}"
            raise TransferFailed(msg) from None
        return self._segment

    def _give_room(self) -> None:
        if self._conn is not None:
            with contextlib.suppress(OSError):  # the wait that follows says it
                self._conn.send(ROOM)

    def _ends(
        self, part: int, size: int, end: int, deadline: Deadline, check: Callable[[], None]
    ) -> Iterator[int]:
        """Yield how far a bucket is, until all of it is there."""
        yield end
        while end < size:
            _, end = self._expect(part, deadline, check)
            yield end

    def _expect(self, part: int, deadline: Deadline, check: Callable[[], None]) -> tuple[int, int]:
        """Wait for word of a bucket; return its slot, and how far it is."""
        said = _heard(self._wait(deadline, check))
        if not said:
            raise TransferFailed(_GONE)
        found, slot, end = SAYS.unpack(said)
        if found != part:
            msg = f"the trainer speaks of bucket {found} in the place of {part}"
            raise TransferFailed(msg)
        return int(slot), int(end)

    def _wait(self, deadline: Deadline, check: Callable[[], None]) -> socket.socket:
        """Wait until the trainer says something, or hangs up."""
        conn = self._conn
        if conn is None:
            raise TransferFailed(_GONE)
        poll = select.poll()
        poll.register(conn, select.POLLIN)
        while not poll.poll(POLL_MS):
            check()
            if not deadline.left_s:
                msg = f"the trainer sent nothing more within {deadline.timeout_s:g} s"
                raise TransferFailed(msg)
        return conn


def _heard(conn: socket.socket) -> bytes:
    """Return the next word, or nothing if there is none. An end that hung up with words of ours
    unread is an error first, and only then what it had said.
    """
    for _ in range(2):
        with contextlib.suppress(OSError):
            return conn.recv(SAYS.size)
    return b""


def _copied(to: torch.Tensor, bucket: torch.Tensor, ends: Iterable[int]) -> Iterator[int]:
    """Copy a bucket as it comes, and yield how far: who reads it at once finds it in the cache."""
    start = 0
    for come in ends:
        while start < come:
            end = min(start + _COPIED_BYTES, come)
            to[start:end] = bucket[start:end]
            yield end
            start = end
