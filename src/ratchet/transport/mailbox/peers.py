"""The peers of a node by name, for as long as there is something to know of them.

Consumes names, produces a `Peer` for each that is asked for; waits for nothing. Of one of which
nothing is left but its name, a visitor that has gone, only the last incarnation is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ratchet.status import LinkRow
from ratchet.transport.mailbox.peer import Peer

_MAX_FORMER: Final = 1024


class Peers(dict[str, Peer]):
    """A name that is not there yet gets a peer.

    Args:
        new_peer: makes one.
    """

    def __init__(self, new_peer: Callable[[str], Peer]) -> None:
        super().__init__()
        self._new_peer = new_peer
        self._former: dict[str, str] = {}
        """the last incarnation of each peer that was forgotten: what replaces it must stay newer"""

    def __missing__(self, name: str) -> Peer:
        """Make it."""
        peer = self[name] = self._new_peer(name)
        peer.lives.present = self._former.pop(name, None)
        return peer

    def forget(self, is_of_use: Callable[[str], bool]) -> None:
        """Drop the peers of which nothing is left but a name that is of no use."""
        for name, peer in tuple(self.items()):
            if not peer.spent or is_of_use(name):
                continue
            del self[name]
            if peer.lives.present is not None:
                self._former[name] = peer.lives.present
        while len(self._former) > _MAX_FORMER:
            del self._former[next(iter(self._former))]

    def links(self) -> tuple[LinkRow, ...]:
        """Return every link as it is now, as others may read it."""
        return tuple(
            LinkRow(
                peer=name,
                connected=peer.connected,
                silent_s=peer.silent_s,
                num_queued=peer.session.num_queued,
                num_in_flight=peer.session.num_in_flight,
                trouble=None if peer.trouble is None else str(peer.trouble),
            )
            for name, peer in self.items()
        )
