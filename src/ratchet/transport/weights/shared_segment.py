"""Memory that a trainer shares with the engines on its own host: two buckets and a trailer.

Consumes sizes or a file descriptor, produces uint8 tensors over the same pages. Waits for nothing.

The memory has no name (memfd), so nothing is left behind whoever is killed, and it does not count
against the size of /dev/shm, which is 64 MB in most containers. It is sealed: nobody can shrink it
below a reader. A reader maps it privately, so that what an engine writes there stays its own.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import sys
from pathlib import Path
from typing import Any, Final

import torch

from ratchet.transport.weights.staging import NUM_STAGING

_HELLO: Final = struct.Struct("<qq")
HELLO_BYTES: Final = _HELLO.size
_PAGE: Final = 4096


class Segment:
    """What both ends see of it."""

    def __init__(self, memory: mmap.mmap, slot_bytes: int) -> None:
        self.memory = torch.frombuffer(memory, dtype=torch.uint8)
        start = NUM_STAGING * slot_bytes
        self.slots = self.memory[:start].view(NUM_STAGING, slot_bytes).unbind()
        self.trailer = self.memory[start:]


class OwnSegment(Segment):
    """The trainer's."""

    def __init__(self, slot_bytes: int, trailer_bytes: int) -> None:
        """Make one of at least these sizes.

        Raises:
            OSError: if there is no such memory here.
        """
        if sys.platform != "linux":
            msg = "memory without a name needs Linux"
            raise OSError(msg)
        slot_bytes, trailer_bytes = _whole_pages(slot_bytes), _whole_pages(trailer_bytes)
        size = NUM_STAGING * slot_bytes + trailer_bytes
        _check_memory(size)
        self.hello = _HELLO.pack(slot_bytes, size)
        """what a reader must know, beside the descriptor"""
        self.fd = os.memfd_create("ratchet-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)  # the memory comes with the first transfer, off the loop
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
            super().__init__(mmap.mmap(self.fd, size), slot_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        self._pinned = _pin(self.memory)

    def fits(self, slot_bytes: int, trailer_bytes: int) -> bool:
        """Return whether a transfer of these sizes fits."""
        return slot_bytes <= len(self.slots[0]) and trailer_bytes <= len(self.trailer)

    def close(self) -> None:
        """Give the descriptor up; the memory goes with the last mapping. Idempotent: the number may
        be another file's by then.
        """
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        if self._pinned:
            _cudart().cudaHostUnregister(self.memory.data_ptr())
        os.close(fd)


class SeenSegment(Segment):
    """An engine's."""

    def __init__(self, hello: bytes, fd: int) -> None:
        """Map what a trainer shares.

        Raises:
            OSError: if it cannot be mapped.
        """
        slot_bytes, size = _HELLO.unpack(hello)
        super().__init__(mmap.mmap(fd, size, access=mmap.ACCESS_COPY), slot_bytes)
        self._id = _identity(fd)

    def is_of(self, fd: int) -> bool:
        """Return whether this is a mapping of that memory. While it is mapped, no other memory has
        its number.
        """
        return self._id == _identity(fd)


def _identity(fd: int) -> tuple[int, int]:
    stat = os.fstat(fd)
    return stat.st_dev, stat.st_ino


def _check_memory(size: int) -> None:
    """Refuse what is not there: to ask for it would have the system kill a process.

    Raises:
        OSError: if so.
    """
    with Path("/proc/meminfo").open() as lines:
        known = dict(line.split(":") for line in lines)
    available = int(known["MemAvailable"].split()[0]) * 1024
    if size > available:
        msg = f"{size} bytes of shared memory are needed, {available} are available"
        raise OSError(errno.ENOMEM, msg)


def _pin(memory: torch.Tensor) -> bool:
    """Pin memory for a device to write into, if there is one and it can."""
    if not torch.cuda.is_available():
        return False
    return int(_cudart().cudaHostRegister(memory.data_ptr(), len(memory), 0)) == 0


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
