"""Why a peer is not dialled any more, and what ends that. Pure.

Consumes refusals and where the peer is said to listen; produces the error with which what is sent
to it ends at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ratchet.errors import ActorDead, AuthFailed, RatchetError
from ratchet.transport.mailbox.address import Address


class Refusal:
    """The last refusal of one peer."""

    def __init__(self, where: Callable[[], Address | None], now: Callable[[], float]) -> None:
        self._where = where
        self._now = now
        self._error: RatchetError | None = None
        self._at: Address | None = None
        self._till: float | None = None

    def note(self, error: RatchetError, at: Address | None = None, for_s: float = math.inf) -> None:
        """It will not have us. One that says that we were replaced counts for `for_s` seconds."""
        self._error, self._at = error, at
        self._till = self._now() + for_s if isinstance(error, ActorDead) else None

    def forget(self) -> None:
        """It is there, and has us."""
        self._error = self._at = self._till = None

    @property
    def error(self) -> RatchetError | None:
        """Why it will not be dialled. It will be, once it is said to listen elsewhere; and who was
        refused as replaced asks again, as the registry may think otherwise.
        """
        if self._error is None:
            return None
        if self._till is not None and self._now() >= self._till:
            self.forget()
        elif self._at is not None and isinstance(self._error, AuthFailed):
            now = self._where()
            if now is not None and now != self._at:
                self.forget()
        return self._error
