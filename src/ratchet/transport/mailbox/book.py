"""Where the nodes of a run listen.

Consumes what the registry tells of its roles, produces the address for a name; waits for nothing:
whoever dials asks again.
"""

from __future__ import annotations

from collections.abc import Mapping

from ratchet.transport.mailbox.address import Address


class AddressBook:
    """The newest known address of each name. The registry's is there from the start."""

    def __init__(self, known: Mapping[str, Address] | None = None) -> None:
        self._known = dict(known or {})

    def learn(self, name: str, address: str) -> None:
        """Note where a name listens now; an empty text says that it cannot be dialled.

        Raises:
            ConfigError: the text is not an address.
        """
        if address:
            self._known[name] = Address.parse(address)

    def locate(self, name: str) -> Address:
        """Return where to dial.

        Raises:
            LookupError: not known yet.
        """
        try:
            return self._known[name]
        except KeyError:
            raise LookupError(f"nobody has told yet where {name} listens") from None
