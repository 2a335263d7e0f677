"""What a peer needs of its node: the protocols between the parts of this package."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from ratchet.errors import RatchetError
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.flight import Item
from ratchet.transport.mailbox.frames import Envelope
from ratchet.transport.mailbox.shared import Loan

if TYPE_CHECKING:
    from ratchet.transport.mailbox.peer import Peer


class Log(Protocol):
    """The part of a structlog logger that this package uses."""

    def debug(self, event: str, **fields: Any) -> Any:
        """For whoever looks closely."""
        ...

    def info(self, event: str, **fields: Any) -> Any:
        """What is in order."""
        ...

    def warning(self, event: str, **fields: Any) -> Any:
        """What is not, and is handled."""
        ...

    def error(self, event: str, **fields: Any) -> Any:
        """What a person must mend."""
        ...


class Hub(Protocol):
    """What a peer needs of its node."""

    @property
    def name(self) -> str:
        """This node's name."""
        ...

    @property
    def log(self) -> Log:
        """Where events go."""
        ...

    def where(self, name: str) -> Address | None:
        """Return the address to dial, or None if nobody knows it."""
        ...

    def is_newest(self, name: str, incarnation: str) -> bool | None:
        """Whether the registry says that this life of a name is the newest; None: not a word."""
        ...

    async def dial(self, name: str) -> None:
        """Open a connection to the peer; it is then with `Peer.take`."""
        ...

    def copy(self, loan: Loan) -> asyncio.Future[bool]:
        """Fill a loan on another thread."""
        ...

    def deliver(self, peer: Peer, envelopes: list[Envelope]) -> None:
        """Hand out what has arrived."""
        ...

    def lost(self, peer: Peer, items: list[Item], error: RatchetError) -> None:
        """Account for what was not delivered."""
        ...

    def ended(self, peer: Peer, error: RatchetError) -> None:
        """A life of the peer is over: end asks and watches."""
        ...

    def settled(self) -> None:
        """The peer has received everything."""
        ...
