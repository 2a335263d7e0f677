"""Arrays of a message in memory that two processes of one host share: written once, read in place.

Consumes arrays, produces files in memory (memfd) that hold them, and read-only views of those of a
peer. Waits for nothing.

A file is sealed before anybody hears of it: it can neither change nor shrink, so its reader need
not trust whoever wrote it. The reader opens it by its number in the sender's process (under
/proc, which the kernel grants to processes of the same user), and the kernel says which process
that is (SO_PEERCRED). The memory is freed with the last view or descriptor, whoever has died
meanwhile. Views that are sent on are not copied: the next process gets the same file.

Each mapping takes two descriptors, its own and the one by which the file is passed on. Once half of
those that this process may have are taken, arrays are copied out of their file instead.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from ratchet.transport.mailbox.huge_pages import HUGE_BYTES, use_huge_pages

SHARED_BYTES: Final = 256 << 10
"""Arrays of a message that have so many bytes together are shared; to copy fewer is no dearer."""

_ALIGN: Final = 64
_MOST_PARTS: Final = 512
"""So many parts are written by one call; the kernel takes 1,024."""

Array: TypeAlias = bytes | memoryview
"""Bytes, or a view of a `Memory`: neither can change."""


class FileName(msgspec.Struct, frozen=True, array_like=True):
    """What a file is called in the process that lends it."""

    fd: int
    inode: int


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where an array lies; a message may have hundreds."""

    file: int
    """index among the files of the message"""
    offset: int
    num_bytes: int


class File:
    """An open file in memory. It is closed with its last reference."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)

    @property
    def name(self) -> FileName:
        """What to call it to another process."""
        return FileName(self.fd, os.fstat(self.fd).st_ino)


class Memory(mmap.mmap):
    """A sealed file, mapped for reading."""

    file: File
    _offsets: dict[int, tuple[weakref.ref[memoryview], int]]

    @classmethod
    def of(cls, file: File, size: int) -> Memory:
        """Map it."""
        memory = cls(file.fd, size, access=mmap.ACCESS_READ)
        memory.file = file
        memory._offsets = {}
        return memory

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Return a view, which keeps the memory."""
        view = memoryview(self)[offset : offset + num_bytes]
        self._offsets[id(view)] = weakref.ref(view), offset
        return view

    def offset_of(self, view: memoryview) -> int | None:
        """Return where a view begins; None if it is not one that `view` has made."""
        found, offset = self._offsets.get(id(view), (None, 0))
        return offset if found is not None and found() is view else None


def is_lasting(data: object) -> bool:
    """Tell whether an array can wait as it is: nobody can change it."""
    return type(data) is bytes or _place_in(data) is not None


def _place_in(data: object) -> tuple[Memory, int] | None:
    if type(data) is memoryview and type(data.obj) is Memory:
        offset = data.obj.offset_of(data)
        if offset is not None:
            return data.obj, offset
    return None


class Loan:
    """The arrays of one message, for a reader in another process: a file for those that lie in none
    yet, and the files of the others.

    Raises:
        OSError: there is no memory, or no descriptor, for another file.
    """

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._files: dict[File, int] = {}
        """and their indices"""
        self._todo: deque[Array] = deque()
        """what its own file lacks, up to the end"""
        self._done = 0
        self.names: list[FileName] = []
        self.places: list[Place] = []
        size, own = 0, -1
        for array in arrays:
            num_bytes = len(array)
            found = None if type(array) is bytes else _place_in(array)
            if found is not None:
                self.places.append(Place(self._index(found[0].file), found[1], num_bytes))
                continue
            if own < 0:
                self._own = _new_file()
                own = self._index(self._own)
            self.places.append(Place(own, size, num_bytes))
            self._todo.append(array)
            if gap := -num_bytes % _ALIGN:
                self._todo.append(bytes(gap))
            size += num_bytes + gap
        self.num_bytes = size
        """how many are to be copied"""

    def _index(self, file: File) -> int:
        if file not in self._files:
            self._files[file] = len(self._files)
            self.names.append(file.name)
        return self._files[file]

    def fill(self, num_bytes: int) -> bool:
        """Copy at most so many bytes; True once all are there.

        Raises:
            OSError: there is no memory for them.
        """
        if not self._done and self.num_bytes >= HUGE_BYTES:
            use_huge_pages(self._own.fd, self.num_bytes)
        # written and not mapped: pages that are overwritten whole are not cleared first
        end = min(self._done + num_bytes, self.num_bytes)
        while self._done < end:
            self._advance(os.pwritev(self._own.fd, self._head(end - self._done), self._done))
            if self._done == self.num_bytes:
                fcntl.fcntl(self._own.fd, fcntl.F_ADD_SEALS, seals())
        return self._done == self.num_bytes

    def _head(self, num_bytes: int) -> list[Array]:
        """Return what is to be written next, in at most so many bytes."""
        if num_bytes == self.num_bytes - self._done and len(self._todo) <= _MOST_PARTS:
            return list(self._todo)
        parts: list[Array] = []
        for part in itertools.islice(self._todo, _MOST_PARTS):
            parts.append(memoryview(part)[:num_bytes])
            num_bytes -= len(part)
            if num_bytes <= 0:
                break
        return parts

    def _advance(self, num_bytes: int) -> None:
        """Forget what is written."""
        self._done += num_bytes
        if self._done == self.num_bytes:
            self._todo.clear()
            return
        while self._todo and num_bytes >= len(self._todo[0]):
            num_bytes -= len(self._todo.popleft())
        if num_bytes:
            self._todo[0] = memoryview(self._todo[0])[num_bytes:]


def seals() -> int:
    """Nothing of the file changes any more, these seals included."""
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def _new_file() -> File:
    return File(os.memfd_create("ratchet-arrays", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))


def make_probe() -> File | None:
    """Return a file for peers to try whether they can read those of this process; None if it cannot
    make any.
    """
    if sys.platform != "linux":
        return None
    try:
        file = _new_file()
        os.pwrite(file.fd, b"\0", 0)
        fcntl.fcntl(file.fd, fcntl.F_ADD_SEALS, seals())
    except OSError:
        return None
    return file
