"""What is on its way to a peer, in the pieces by which it is numbered. Pure.

Consumes an envelope with its arrays, produces frames. An envelope is one piece in a frame of many
(`Batch`), or is cut into pieces of a frame each (`Fragment`), or goes whole, its arrays by
reference (`Run`). A run has the numbers that its fragments would have: they take its place when a
peer comes back over a connection on which nothing is shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeAlias

import msgspec

from ratchet.transport.mailbox.codec import pack, pack_data
from ratchet.transport.mailbox.frames import Part, Shared
from ratchet.transport.mailbox.shared import Array, Loan


class Copying(Protocol):
    """A thread fills a loan."""

    def done(self) -> bool:
        """Tell whether it has ended."""
        ...

    def result(self) -> bool:
        """Return True, or raise the `OSError` of `Loan.fill`."""
        ...


class Item(msgspec.Struct, eq=False):
    """An envelope on its way, with the arrays that travel beside it."""

    body: bytes
    deadline: float
    arrays: tuple[Array, ...] = ()
    section: int = 0
    """what its next piece is of: 0 the envelope, n the n-th array"""
    offset: int = 0
    """where in that the next piece begins"""
    loan: Loan | None = None
    """the arrays in shared memory, while they are copied there"""
    copying: Copying | None = None
    """copies them on another thread"""
    in_pieces: bool = False
    """there was no room to share it"""
    array_bytes: int = 0
    """size of the arrays; asked for more often than they are many"""
    num_bytes: int = 0
    """size of all that travels"""

    def __post_init__(self) -> None:
        """Add the sizes up."""
        if self.arrays:
            self.array_bytes = sum(map(len, self.arrays))
        self.num_bytes = len(self.body) + self.array_bytes

    @property
    def begun(self) -> bool:
        """A piece of it is numbered, and another one is not."""
        return self.section > 0 or self.offset > 0

    def next_bytes(self, limit: int) -> int:
        """Return the size of its next piece."""
        return min(limit, len(self._open) - self.offset)

    @property
    def _open(self) -> Array:
        return self.arrays[self.section - 1] if self.section else self.body

    def sections(self, limit: int) -> tuple[Array, ...]:
        """Return what is shared of it: its arrays, and before them its envelope if it is long."""
        return (self.body, *self.arrays) if len(self.body) > limit else self.arrays

    def cut_off(self, limit: int) -> tuple[memoryview, bool, bool]:
        """Return its next piece, and of it what `Part` says: more, cut."""
        section, begin = self._open, self.offset
        end = begin + self.next_bytes(limit)
        cut = end == len(section)
        self.section, self.offset = (self.section + 1, 0) if cut else (self.section, end)
        more = self.section <= len(self.arrays)
        return memoryview(section)[begin:end], more, cut and more

    def count(self, limit: int) -> int:
        """Return how many pieces it has."""
        return sum([-(-len(each) // limit) or 1 for each in (self.body, *self.arrays)])


class Batch(msgspec.Struct, eq=False):
    """Whole envelopes that were sent in one frame: the pieces `first`, `first + 1` ..."""

    first: int
    items: list[Item]
    num_bytes: int

    @property
    def last(self) -> int:
        """The number of its last piece."""
        return self.first + len(self.items) - 1

    def frame(self, acks: tuple[int, int], lane: int) -> bytes:
        """Return it with the acks of both lanes."""
        return pack_data(acks, lane, self.first, [item.body for item in self.items])

    def drop(self, count: int) -> int:
        """Forget what is acknowledged; return its size."""
        size = sum(len(item.body) for item in self.items[:count])
        self.items = self.items[count:]
        self.first += count
        self.num_bytes -= size
        return size


class Fragment(msgspec.Struct, eq=False):
    """One piece of a long envelope, or of an array."""

    first: int
    item: Item
    data: memoryview
    more: bool
    cut: bool

    @property
    def last(self) -> int:
        """The number of its last piece."""
        return self.first

    @property
    def num_bytes(self) -> int:
        """Size of what travels."""
        return len(self.data)

    @property
    def items(self) -> list[Item]:
        """The envelopes that it is of."""
        return [self.item]

    def frame(self, acks: tuple[int, int], lane: int) -> bytearray:
        """Return it with the acks of both lanes."""
        return pack(Part(acks, lane, self.first, self.more, self.data, self.cut))


class Run(msgspec.Struct, eq=False):
    """All pieces of an envelope whose arrays are shared."""

    first: int
    last: int
    item: Item
    loan: Loan

    @property
    def num_bytes(self) -> int:
        """Size of what travels."""
        return self.item.num_bytes

    @property
    def items(self) -> list[Item]:
        """The envelopes that it is of."""
        return [self.item]

    def frame(self, acks: tuple[int, int], lane: int) -> bytearray:
        """Return it with the acks of both lanes."""
        count = self.last - self.first + 1
        loan = self.loan
        is_long = len(loan.places) > len(self.item.arrays)
        body = memoryview(b"" if is_long else self.item.body)
        return pack(Shared(acks, lane, self.first, count, body, loan.names, loan.places))

    def fragments(self, limit: int) -> Iterator[Fragment]:
        """Yield its pieces one by one."""
        for number in range(self.first, self.last + 1):
            yield Fragment(number, self.item, *self.item.cut_off(limit))


Sent: TypeAlias = Batch | Fragment | Run
