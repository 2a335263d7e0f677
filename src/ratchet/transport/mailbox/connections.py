"""The open connections of a node: how many there may be, who has to go, whose failure is logged.

Consumes what connections tell of themselves, produces log lines; waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ratchet.errors import AuthFailed
from ratchet.transport.mailbox.connection import Connection
from ratchet.transport.mailbox.hello import Refused
from ratchet.transport.mailbox.hub import Log

_MAX_LOGGED: Final = 64


class Connections:
    """In the order in which they came; those of strangers are counted too, from their first byte.

    Args:
        owner: name of the node.
        limit: how many there may be.
        log: where refusals go.
    """

    def __init__(self, owner: str, limit: int, log: Log) -> None:
        self._owner = owner
        self._limit = limit
        self._log = log
        self._open: dict[Connection, None] = {}
        self._logged: set[tuple[str, str]] = set()
        self.num_refused = 0
        """those that were turned away, or did not get through their hello"""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Connection]:
        return iter(tuple(self._open))

    def add(self, connection: Connection) -> None:
        """Count a new one. When all are taken, it displaces one that has not proved itself: first
        of those that were refused and linger, then the oldest. So strangers cannot keep the nodes
        of the run out by holding sockets open.
        """
        strangers = sorted(filter(_is_stranger, self._open), key=lambda other: not other.closed)
        self._open[connection] = None
        excess = len(self._open) - self._limit
        if len(strangers) < excess:
            text = f"{self._owner} has {self._limit} connections"
            connection.refuse(Refused("busy", text))
            return
        for other in strangers[: max(0, excess)]:
            self.num_refused += not other.closed
            other.abort()

    def discard(self, connection: Connection) -> None:
        """Forget one that is closed."""
        self._open.pop(connection, None)

    def names_in_hello(self) -> set[str]:
        """Return the names that are claimed at the other ends."""
        return {each.handshake.peer.name for each in self._open if each.handshake.peer}

    def failed(self, connection: Connection, error: Exception) -> None:
        """Log why a hello failed, once for each peer and reason; who dialled logs on its own."""
        self.num_refused += 1
        if connection.handshake.dials:
            return
        claimed, at = connection.handshake.claimed, connection.remote
        kind = error.kind if isinstance(error, Refused) else type(error).__name__
        is_auth = isinstance(error, Refused) and isinstance(error.as_error(), AuthFailed)
        # a stranger without a name has a machine: its port is another each time
        known = (claimed if connection.handshake.peer else at.rpartition(":")[0], kind)
        if not is_auth or known in self._logged or len(self._logged) >= _MAX_LOGGED:
            self._log.debug("hello_failed", peer=claimed, at=at, error=str(error))
            return
        self._logged.add(known)
        self._log.error("auth_failed", peer=claimed, at=at, error=str(error))


def _is_stranger(connection: Connection) -> bool:
    """Tell whether somebody has come in who has not proved to be of the run, or was refused."""
    return not (connection.handshake.dials or connection.handshake.done)
