"""Buckets to engines on the trainer's own host, through memory that both map: both ends.

The trainer's end gathers straight into one of two slots and says so; an engine verifies and writes
from there, and gives room for one more bucket when its end has room. What they say travels over a
local socket, which also hands the memory over, orders what is written there for the other end to
see, and tells at once of an end that died.

The trainer waits for room, an engine for the next bucket: until the deadline, an abandoned link or
the other's end. An engine that keeps the others waiting is dropped early enough that they still
make it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final

from ratchet.errors import TransferFailed
from ratchet.transport.weights.buckets import host_bytes
from ratchet.transport.weights.digest import trailer_bytes
from ratchet.transport.weights.groups import Deadline
from ratchet.transport.weights.shared_door import ROOM, Door, Visitor, knock
from ratchet.transport.weights.shared_segment import HELLO_BYTES, OwnSegment, SeenSegment

if TYPE_CHECKING:
    import torch

    from ratchet.transport.weights.inbox import Inbox
    from ratchet.types import WeightManifest

_SAYS: Final = struct.Struct("<q")
"""trainer to engine: the bucket that is there now; their number stands for the trailer"""
_POLL_MS: Final = 20
"""How often a wait looks whether its link was abandoned; a message ends it at once."""
_PATIENCE: Final = 0.5
"""Share of the time left for which the others wait for an engine."""
_GONE: Final = "the trainer hung up"
_HUNG_UP: Final = "it hung up"


class Sharing:
    """The trainer's end of one transfer."""

    def __init__(
        self, door: Door, segment: OwnSegment, transfer: str, ranks: Collection[int]
    ) -> None:
        self.slots = segment.slots
        """where buckets are gathered, one after the other"""
        self.lost: dict[int, str] = {}
        """ranks that did not get everything, and why"""
        self._door = door
        self._segment = segment
        self._coming = {_name(transfer, rank): rank for rank in ranks}
        self._here: dict[int, Visitor] = {}

    @property
    def ranks(self) -> frozenset[int]:
        """Engines that take part, and are not lost."""
        return frozenset((*self._here, *self._coming.values()))

    def wait_for_room(self, index: int, deadline: Deadline, check: Callable[[], None]) -> None:
        """Wait until every engine has come and has room for a bucket; the lost do not count.

        Args:
            index: of the bucket.
            deadline: of the transfer.
            check: called before each look; may raise, or call `lose`.
        """
        patience = Deadline(deadline.left_s * _PATIENCE)
        while True:
            check()
            slow = [rank for rank, reader in self._here.items() if reader.room <= index]
            slow += self._coming.values()
            if not slow:
                return
            limit = patience if len(slow) < len(self.ranks) else deadline
            if not limit.left_s:
                for rank in slow:
                    self.lose(rank, f"it took no bucket for {limit.timeout_s:.1f} s")
                return
            self._hear()

    def publish(self, index: int) -> None:
        """Say that a bucket is in its slot."""
        self._segment.settle()
        for rank, reader in list(self._here.items()):
            if not reader.tell(_SAYS.pack(index)):
                self.lose(rank, _HUNG_UP)

    def publish_trailer(self, num_buckets: int, trailer: torch.Tensor) -> None:
        """Say that all is there, and what the digests are."""
        self._segment.trailer[: len(trailer)].copy_(trailer)
        self.publish(num_buckets)

    def lose(self, rank: int, why: str) -> None:
        """Go on without an engine. Harmless if that is so already."""
        if rank in self.ranks:
            self.lost[rank] = why
        self._coming = {name: other for name, other in self._coming.items() if other != rank}
        reader = self._here.pop(rank, None)
        if reader is not None:
            reader.close()

    def end(self) -> bool:
        """Hang up on everybody; return False if one is not through with its last buckets."""
        reading = [reader.hear() for reader in self._here.values()]
        for reader in self._here.values():
            reader.close()
        self._here.clear()
        return not any(reading)

    def _hear(self) -> None:
        ranks = {reader.fileno(): rank for rank, reader in self._here.items()}
        poll = select.poll()
        for fd in (self._door.fileno(), *ranks):
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(_POLL_MS):
            if fd not in ranks:
                self._let_in()
            elif not self._here[ranks[fd]].hear():
                self.lose(ranks[fd], _HUNG_UP)

    def _let_in(self) -> None:
        for name, reader in self._door.who_knocked().items():
            rank = self._coming.pop(name, None)
            if rank is None:
                reader.close()
                continue
            self._here[rank] = reader
            reader.tell(self._segment.hello, self._segment.fd)


class SharedRing:
    """The trainer's end: a door, and memory that is kept from transfer to transfer, as fresh
    memory is slow. Belongs to one thread.
    """

    def __init__(self) -> None:
        """Open the door.

        Raises:
            OSError: if there are no such sockets here.
        """
        self._door = Door()
        self.address = self._door.address
        """where engines knock"""
        self._segment: OwnSegment | None = None
        self._last: Sharing | None = None

    def open(self, transfer: str, ranks: Collection[int], manifest: WeightManifest) -> Sharing:
        """Begin a transfer; its engines are told to knock.

        Raises:
            OSError: if there is not that much memory.
        """
        segment = self._reserve(max(manifest.bucket_bytes), trailer_bytes(manifest))
        self._last = Sharing(self._door, segment, transfer, ranks)
        return self._last

    def leave(self) -> None:
        """Hang up on everybody, who fails if it has not got everything, and give the memory
        back.
        """
        last, self._last = self._last, None
        if last is not None:
            last.end()
        self._retire()

    def close(self) -> None:
        """Leave, and shut the door."""
        self.leave()
        self._door.close()

    def _reserve(self, *sizes: int) -> OwnSegment:
        """Return memory that nobody reads any more. An engine that is not through with its last
        buckets keeps what it reads.
        """
        if self._last is not None and not self._last.end():
            self._retire()
        self._last = None
        if self._segment is not None and not self._segment.fits(*sizes):
            self._retire()
        if self._segment is None:
            self._segment = OwnSegment(*sizes)
        return self._segment

    def _retire(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()


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
        self._conn = knock(address, _name(transfer, rank), max(deadline.left_s, 0.001))

    def receive(
        self, manifest: WeightManifest, inbox: Inbox, deadline: Deadline, check: Callable[[], None]
    ) -> None:
        """Take everything, and hand it over as it comes. The memory is in use until `hang_up`.

        Raises:
            TransferFailed: if the trainer hung up, the deadline passed, or from `check`.
        """
        segment = self._attach(deadline, check)
        for index, size in enumerate(manifest.bucket_bytes):
            inbox.wait_for_room(deadline)
            self._give_room()
            self._expect(index, deadline, check)
            inbox.put_bucket(index, segment.slots[index % len(segment.slots)][:size])
        self._expect(len(manifest.bucket_bytes), deadline, check)
        inbox.put(bytes(host_bytes(segment.trailer[: trailer_bytes(manifest)])))

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

    def _expect(self, index: int, deadline: Deadline, check: Callable[[], None]) -> None:
        """Wait for the word on a bucket."""
        said = _heard(self._wait(deadline, check))
        if not said:
            raise TransferFailed(_GONE)
        if said != _SAYS.pack(index):
            msg = f"the trainer speaks of bucket {_SAYS.unpack(said)[0]} in the place of {index}"
            raise TransferFailed(msg)

    def _wait(self, deadline: Deadline, check: Callable[[], None]) -> socket.socket:
        """Wait until the trainer says something, or hangs up."""
        conn = self._conn
        if conn is None:
            raise TransferFailed(_GONE)
        poll = select.poll()
        poll.register(conn, select.POLLIN)
        while not poll.poll(_POLL_MS):
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
            return conn.recv(_SAYS.size)
    return b""


def _name(transfer: str, rank: int) -> str:
    return f"{transfer}/{rank}"
