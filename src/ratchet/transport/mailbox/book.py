"""Where the nodes of a run listen, and which of two processes with one name is the newer.

Consumes what the registry tells of its roles, produces the address for a name; waits for nothing:
whoever dials asks again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from ratchet.transport.mailbox.address import Address

_MAX_LIVES: Final = 16


class AddressBook:
    """The newest known address of each name. The registry's is there from the start."""

    def __init__(self, known: Mapping[str, Address] | None = None) -> None:
        self._known = dict(known or {})
        self._lives: dict[str, deque[str]] = {}
        """incarnations of each name as the registry has told of them, the newest last"""
        self._superseded: set[tuple[str, str]] = set()

    def learn(self, name: str, address: str, incarnation: str | None = None) -> None:
        """Note where a name listens now, and in which life; an empty address says that it cannot be
        dialled.

        Raises:
            ConfigError: the text is not an address.
        """
        if address:
            self._known[name] = Address.parse(address)
        if incarnation is not None:
            lives = self._lives.setdefault(name, deque(maxlen=_MAX_LIVES))
            if incarnation in lives:
                lives.remove(incarnation)
            lives.append(incarnation)

    def supersede(self, name: str, incarnation: str) -> None:
        """Note a life of a name that a later one has followed; a registry has that on its disk."""
        self._superseded.add((name, incarnation))

    def is_newest(self, name: str, incarnation: str) -> bool | None:
        """Whether this life of a name is the last one that the registry has told of; None for one
        that it has not told of.

        Two processes of one name may reach each node in another order. The registry's order is the
        same for all.
        """
        if (name, incarnation) in self._superseded:
            return False
        lives = self._lives.get(name)
        if lives is None or incarnation not in lives:
            return None
        return lives[-1] == incarnation

    def locate(self, name: str) -> Address:
        """Return where to dial.

        Raises:
            LookupError: not known yet.
        """
        try:
            return self._known[name]
        except KeyError:
            raise LookupError(f"nobody has told yet where {name} listens") from None
