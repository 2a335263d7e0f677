"""Huge pages for a file in memory, where the kernel has some to give.

Consumes a new file, allocates its extents of 2 MiB as one page each: to fill and free 512 small
ones takes four times as long. Waits for the kernel to find memory, so not on an event loop.

MADV_COLLAPSE (madvise(2), Linux 6.1) is asked for each file, as few hosts have huge pages for all
shared memory (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`). It takes a mapping that lies on
a multiple of their size, which Python's `mmap` cannot ask for.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from typing import Final

HUGE_BYTES: Final = 2 << 20
_MADV_COLLAPSE: Final = 25
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_FAILED: Final = ctypes.c_void_p(-1).value
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def use_huge_pages(fd: int, size: int) -> None:
    """Give an empty file its size, and huge pages as far as there are some; other pages come as
    they are written.

    Raises:
        OSError: there is no memory at all.
    """
    os.ftruncate(fd, size)
    whole = size - size % HUGE_BYTES
    if not whole or sys.platform != "linux":
        return
    for start in range(0, whole, HUGE_BYTES):
        os.pwrite(fd, b"\0", start)  # an extent that is all hole is left as it is
    room = whole + HUGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    reserved = _LIBC.mmap(None, room, _PROT_NONE, flags, -1, 0)
    if reserved == _FAILED:
        return
    try:
        aligned = -(-reserved // HUGE_BYTES) * HUGE_BYTES
        access = mmap.PROT_READ | mmap.PROT_WRITE
        if _LIBC.mmap(aligned, whole, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) == aligned:
            _LIBC.madvise(aligned, whole, _MADV_COLLAPSE)  # if it fails, pages are small
    finally:
        _LIBC.munmap(reserved, room)
