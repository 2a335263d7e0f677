"""The reader's side of memory that processes of one host share (`shared`): the files of a peer.

Consumes names of files and places in them, as the peer says them, and produces views of what lies
there. Waits for nothing. The peer is not trusted: the kernel says which process it is, and what it
says of a file is compared with the file.
"""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import stat
import struct
import sys
from collections.abc import Sequence
from typing import Final

from ratchet.errors import ProtocolError
from ratchet.transport.mailbox.shared import Array, File, FileName, Memory, Place, seals

_CREDENTIALS: Final = struct.Struct("3i")
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class Unreadable(Exception):  # noqa: N818 - caught within this package
    """A file of the peer is out of reach: the peer has ended or closed it, or this process has no
    more descriptors.
    """


class PeerFiles:
    """The files of the process at the other end of a Unix socket."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    @classmethod
    def behind(cls, conn: object) -> PeerFiles | None:
        """Return those behind an asyncio socket; None if its other end is on another host, of
        another user, or in a namespace of processes that this one does not see.
        """
        if sys.platform != "linux" or getattr(conn, "family", None) != socket.AF_UNIX:
            return None
        said = conn.getsockopt(  # type: ignore[attr-defined]  # asyncio.TransportSocket
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        pid, uid, _ = _CREDENTIALS.unpack(said)
        return cls(pid) if pid > 0 and uid == os.getuid() else None

    def can_read(self, probe: FileName) -> bool:
        """Tell whether the peer's probe can be opened from here, and is what the peer says."""
        try:
            self._open(probe)
        except (OSError, ProtocolError):
            return False
        return True

    def arrays(self, names: Sequence[FileName], places: Sequence[Place]) -> list[Array]:
        """Return views of arrays of the peer, or copies where no more can be mapped.

        Raises:
            Unreadable: a file is out of reach.
            ProtocolError: a file is not what the peer says, could change, or is too short.
        """
        try:
            return _views([self._open(name) for name in names], places)
        except OSError as error:
            raise Unreadable(str(error)) from error

    def _open(self, name: FileName) -> tuple[File, int]:
        file = File(os.open(f"/proc/{self._pid}/fd/{name.fd}", _FLAGS))
        status = os.fstat(file.fd)
        if not stat.S_ISREG(status.st_mode) or status.st_ino != name.inode:
            raise ProtocolError(f"descriptor {name.fd} of the peer is not what it says")
        try:
            sealed = fcntl.fcntl(file.fd, fcntl.F_GET_SEALS)
        except OSError:  # on a disk
            sealed = 0
        if sealed & seals() != seals():
            raise ProtocolError(f"descriptor {name.fd} of the peer could still change: not sealed")
        if not status.st_size:
            raise ProtocolError(f"descriptor {name.fd} of the peer is empty")
        return file, status.st_size


def _views(opened: list[tuple[File, int]], places: Sequence[Place]) -> list[Array]:
    for place in places:
        if not 0 <= place.file < len(opened):
            raise ProtocolError(f"an array lies in file {place.file} of {len(opened)}")
        size = opened[place.file][1]
        if place.offset < 0 or place.num_bytes < 0 or place.offset + place.num_bytes > size:
            raise ProtocolError(f"an array ends outside its file of {size} bytes")
    if any(_is_scarce(file.fd) for file, _ in opened):
        return [os.pread(opened[p.file][0].fd, p.num_bytes, p.offset) for p in places]
    mapped = [Memory.of(file, size) for file, size in opened]
    return [mapped[p.file].view(p.offset, p.num_bytes) for p in places]


def _is_scarce(fd: int) -> bool:
    """Tell whether half of all descriptors are taken: a new one has the lowest free number."""
    return 2 * fd > resource.getrlimit(resource.RLIMIT_NOFILE)[0]
