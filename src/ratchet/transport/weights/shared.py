"""Buckets to engines on the trainer's own host, through memory that both map: the trainer's end.

The trainer's end gathers straight into one of two slots and says so; an engine verifies and writes
from there, and gives room for one more bucket when its end has room. What they say travels over a
local socket, which also hands the memory over, orders what is written there for the other end to
see, and tells at once of an end that died.

Waits for room, until a deadline, an abandoned link or an engine's end.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final

import torch

from ratchet.transport.weights.deadline import Deadline
from ratchet.transport.weights.digest import trailer_bytes
from ratchet.transport.weights.shared_door import POLL_MS, SAYS, Door, Visitor, name_of
from ratchet.transport.weights.shared_segment import OwnSegment

if TYPE_CHECKING:
    from ratchet.types import WeightManifest

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
        self._coming = {name_of(transfer, rank): rank for rank in ranks}
        self._here: dict[int, Visitor] = {}

    @property
    def ranks(self) -> frozenset[int]:
        """Engines that take part, and are not lost."""
        return frozenset((*self._here, *self._coming.values()))

    def wait_for_room(
        self, num_buckets: int, deadline: Deadline, check: Callable[[], None]
    ) -> None:
        """Wait until every engine has come and given room for so many buckets, in all; the lost do
        not count.

        Args:
            num_buckets: that have been published, and the next one.
            deadline: after which an engine is lost.
            check: called before each look; may raise, or call `lose`.
        """
        while True:
            check()
            slow = [rank for rank, reader in self._here.items() if reader.room < num_buckets]
            slow += self._coming.values()
            if slow and not deadline.left_s:
                for rank in slow:
                    self.lose(rank, f"it took no bucket for {deadline.timeout_s:.3g} s")
                return
            if not slow:
                return
            self._hear()

    def publish(self, part: int, slot: int, end: int) -> None:
        """Say how far a bucket is in a slot."""
        for rank, reader in list(self._here.items()):
            if not reader.tell(SAYS.pack(part, slot, end)):
                self.lose(rank, _HUNG_UP)

    def publish_trailer(self, num_buckets: int, trailer: bytes) -> None:
        """Say that all is there, and what the digests are."""
        data = torch.frombuffer(bytearray(trailer), dtype=torch.uint8)
        self._segment.trailer[: len(data)].copy_(data)
        self.publish(num_buckets, 0, 0)

    def wait_until_read(self, deadline: Deadline, check: Callable[[], None]) -> bool:
        """Wait until every engine is through with its buckets; return whether that is so."""
        while self._here and deadline.left_s:
            check()
            self._hear()
        return not self._here

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
        for fd, _ in poll.poll(POLL_MS):
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

    @property
    def slots(self) -> Sequence[torch.Tensor]:
        """The memory that was reserved last."""
        return () if self._segment is None else self._segment.slots

    def reserve(self, manifest: WeightManifest) -> None:
        """Make two slots, in memory that nobody reads any more. An engine that is not through
        with the buckets of an earlier transfer keeps what it reads.

        Raises:
            OSError: if there is not that much memory.
        """
        sizes = max(manifest.bucket_bytes), trailer_bytes(manifest)
        if self._last is not None and not self._last.end():
            self._retire()
        self._last = None
        if self._segment is not None and not self._segment.fits(*sizes):
            self._retire()
        if self._segment is None:
            self._segment = OwnSegment(*sizes)

    def open(self, transfer: str, ranks: Collection[int]) -> Sharing:
        """Begin to send what is gathered in the memory that was reserved last; the engines are told
        to knock.
        """
        if self._segment is None:
            msg = "there is no memory to share"
            raise RuntimeError(msg)
        self._last = Sharing(self._door, self._segment, transfer, ranks)
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

    def _retire(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()
