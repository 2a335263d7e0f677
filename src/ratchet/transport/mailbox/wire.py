"""The seam to sockets: all that this package asks of the network, behind two methods.

Consumes addresses and asyncio protocols; produces connections. A simulation brings its own `Wire`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ratchet.errors import ConfigError
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.credentials import Credentials
from ratchet.transport.mailbox.tls import Guest, TlsEnd

_BACKLOG = 128


class Listener(Protocol):
    """An open door."""

    @property
    def address(self) -> Address:
        """Where it really is: the port is the one that was bound."""
        ...

    def close(self) -> None:
        """Accept nothing more; what is accepted stays."""
        ...


class Wire(Protocol):
    """Opens connections. `ConnectionRefusedError` and `FileNotFoundError` from `dial` mean that
    nobody listens there.
    """

    async def listen(self, address: Address, accept: Callable[[], Guest]) -> Listener:
        """Listen, with a new protocol for each connection."""
        ...

    async def dial(self, address: Address, protocol: Callable[[], Guest]) -> None:
        """Connect the protocol."""
        ...


class _SocketListener:
    def __init__(self, server: asyncio.Server, address: Address, inode: int | None) -> None:
        self._server = server
        self._inode = inode
        self.address = address

    def close(self) -> None:
        self._server.close()
        if self._inode is not None:
            path = Path(self.address.host)
            # by then another process may have taken the path
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == self._inode:
                    path.unlink()


class SocketWire:
    """Unix sockets of mode 0600 in a directory of mode 0700, and TCP.

    Args:
        credentials: what keeps strangers out. Without, TCP is confined to this machine; with its
            `tls`, all TCP is TLS. Unix sockets never are.
    """

    def __init__(self, credentials: Credentials | None = None) -> None:
        self._credentials = credentials

    async def listen(self, address: Address, accept: Callable[[], Guest]) -> Listener:
        """Bind and listen.

        Raises:
            ConfigError: the address is in use, is not one of this machine's, or could be reached by
                those who must not.
        """
        loop = asyncio.get_running_loop()
        if address.kind == "unix":
            sock, inode = _bind_unix(Path(address.host))
            server = await loop.create_unix_server(accept, sock=sock, backlog=_BACKLOG)
            return _SocketListener(server, address, inode)
        _check_door(address, self._credentials)
        door = self._secured(accept, server_side=True)
        try:
            server = await loop.create_server(door, address.host, address.port, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(f"address {address} cannot be bound: {error.strerror}") from error
        port = server.sockets[0].getsockname()[1]
        return _SocketListener(server, Address("tcp", address.host, port), None)

    async def dial(self, address: Address, protocol: Callable[[], Guest]) -> None:
        """Connect."""
        loop = asyncio.get_running_loop()
        if address.kind == "unix":
            await loop.create_unix_connection(protocol, address.host)
        else:
            secured = self._secured(protocol, server_side=False)
            await loop.create_connection(secured, address.host, address.port)

    def _secured(
        self, guest: Callable[[], Guest], *, server_side: bool
    ) -> Callable[[], asyncio.BaseProtocol]:
        tls = None if self._credentials is None else self._credentials.tls
        if tls is None:
            return guest
        context = tls.server if server_side else tls.client
        return lambda: TlsEnd(guest(), context, server_side=server_side)


def _check_door(address: Address, credentials: Credentials | None) -> None:
    if address.is_name:
        msg = (
            f"address {address}: {address.host!r} is a name, for others to dial; to listen, give "
            "the IP address of this machine that they reach"
        )
        raise ConfigError(msg)
    if not address.is_local and credentials is None:
        msg = (
            f"address {address} can be reached from other machines, and nothing keeps strangers "
            "out: give runtime.token_file (a secret file of mode 0600, the same on every node) or "
            "runtime.tls (ca, cert, key), or use 127.0.0.1"
        )
        raise ConfigError(msg)


def _bind_unix(path: Path) -> tuple[socket.socket, int]:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = stat.S_IMODE(path.parent.stat().st_mode)
    if mode & 0o077:
        msg = (
            f"the directory of address unix:{path} has mode {mode:04o} and other users could reach "
            f"the socket: chmod 700 {path.parent}, or choose another directory"
        )
        raise ConfigError(msg)
    if _is_stale(path):
        path.unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(path))
        path.chmod(0o600)
    except OSError as error:
        sock.close()
        msg = f"address unix:{path} cannot be bound: {error.strerror}; does another process use it?"
        raise ConfigError(msg) from error
    return sock, path.stat().st_ino


def _is_stale(path: Path) -> bool:
    """Tell whether a killed process left its socket behind: nobody listens at it any more."""
    if not path.is_socket():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
