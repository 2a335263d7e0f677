"""How engines come to the trainer on their own host: a local socket, and who may come through it.

Consumes an address, produces a connection at both ends. Its name is not a file: it goes with the
process, whatever ends that, and reaches as far as the network namespace, not over a network. The
kernel says which user the other end is. Waits for room at the door and for a name, which come at
once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path
from typing import Final

_CREDENTIALS: Final = struct.Struct("3i")
_NAME_BYTES: Final = 256
_NAME_S: Final = 0.5
SHARED: Final = "shared"
"""The name of this way in a route."""

ROOM: Final = b"+"
"""What an engine says when it has room for one more bucket."""
SAYS: Final = struct.Struct("<qqq")
"""What the trainer says: which bucket is coming now, its slot, and how many of its bytes are there.
The number of buckets stands for the trailer.
"""
POLL_MS: Final = 20
"""How often a wait looks whether its link was abandoned; a message ends it at once."""


def host_id() -> str:
    """Return what two processes have in common that can share memory: host, user, and namespaces
    of these; "" where no process can.
    """
    proc = Path("/proc")
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        spaces = [(proc / "self/ns" / name).readlink() for name in ("net", "user")]
    except OSError:
        return ""
    return " ".join(map(str, (boot, *spaces, os.getuid())))


class Visitor:
    """An engine that has come, as the trainer sees it. Nothing here waits."""

    def __init__(self, conn: socket.socket) -> None:
        self._conn = conn
        self.room = 0
        """buckets that it has given room for, in all"""

    def hear(self) -> bool:
        """Take what it says; return False if it has hung up."""
        while True:
            try:
                said = self._conn.recv(len(ROOM))
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not said:
                return False
            self.room += 1

    def tell(self, message: bytes, *fds: int) -> bool:
        """Return False if it has hung up."""
        try:
            socket.send_fds(self._conn, [message], fds)
        except OSError:
            return False
        return True

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._conn.fileno()

    def close(self) -> None:
        """Hang up."""
        self._conn.close()


class Door:
    """The trainer's."""

    def __init__(self) -> None:
        """Open it.

        Raises:
            OSError: if there are no such sockets here.
        """
        self._listener = _socket()
        self._listener.bind("")  # the system chooses a name that is not a file
        self._listener.listen(128)
        self._listener.setblocking(False)
        name: bytes = self._listener.getsockname()
        self.address = name[1:].decode()

    def who_knocked(self) -> dict[str, Visitor]:
        """Return who came since the last call, by name; only processes of this user."""
        found: dict[str, Visitor] = {}
        while True:
            try:
                conn, _ = self._listener.accept()
            except BlockingIOError:
                return found
            with contextlib.suppress(OSError):  # it has gone again, or does not say its name
                if _peer_uid(conn) == os.getuid():
                    conn.settimeout(_NAME_S)  # it may have been interrupted in between
                    name = conn.recv(_NAME_BYTES).decode(errors="replace")
                    conn.setblocking(False)
                    found[name] = Visitor(conn)
                    continue
            conn.close()

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._listener.fileno()

    def close(self) -> None:
        """Shut it; who knocked in vain hears so."""
        self._listener.close()


def knock(address: str, name: str, timeout_s: float) -> socket.socket:
    """Come to the door of a trainer.

    Raises:
        OSError: if it is not on this host, or belongs to another user.
    """
    conn = _socket()
    try:
        conn.settimeout(timeout_s)
        conn.connect(f"\0{address}")
        if _peer_uid(conn) != os.getuid():
            msg = "the trainer belongs to another user"
            raise PermissionError(msg)
        conn.send(name.encode())
        conn.setblocking(False)
    except BaseException:
        conn.close()
        raise
    return conn


def name_of(point: str, rank: int) -> str:
    """Return the name under which an engine knocks."""
    return f"{point}/{rank}"


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def _peer_uid(conn: socket.socket) -> int:
    credentials = conn.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(credentials)[1]
    return uid
