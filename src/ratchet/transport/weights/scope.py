"""The time in which a load can still be given up.

Consumes a deadline, an abort and a commit, produces one end for the load. Waits for the load,
unblocked by its end, its deadline, or `abort`; after `commit` by its end alone, so that a stamp is
never left half done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from ratchet.errors import TransferFailed

T = TypeVar("T")


class LoadScope:
    """For one load. Lives on the event loop."""

    def __init__(self, limit_s: float, late: str) -> None:
        """Begin the time.

        Args:
            limit_s: seconds until the load ends by itself.
            late: what it then says.
        """
        self._timeout = asyncio.timeout(limit_s)
        self._reason: str | None = None
        self._late = late
        self._committed = False

    async def run(self, load: Coroutine[Any, Any, T]) -> T:
        """Run the load.

        Raises:
            TransferFailed: if the time is over, or the load was aborted.
        """
        try:
            async with self._timeout:
                return await load
        except TimeoutError:
            if not self._timeout.expired():
                raise
            raise TransferFailed(self._reason or self._late) from None

    def abort(self, reason: str) -> None:
        """End the load now, unless it has committed. The first reason counts."""
        if self._committed or self._reason is not None or self._timeout.expired():
            return
        self._reason = reason
        self._timeout.reschedule(0.0)

    def commit(self) -> None:
        """From here on, run to the end.

        Raises:
            TransferFailed: if the load was aborted meanwhile.
        """
        if self._reason is not None:
            raise TransferFailed(self._reason)
        self._committed = True
        self._timeout.reschedule(None)
