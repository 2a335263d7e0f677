"""A lock with two kinds of holders: those that go first, and those that give way to them.

Consumes requests, produces one holder at a time. Who goes first waits for others of its kind only,
in their order: it tells a holder that gives way to end, and passes all that still wait. Who gives
way waits until nobody else wants the lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class RightOfWay:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._first = 0  # holders and waiters that go first
        self._cut: asyncio.Future[str] | None = None  # of the holder that gives way

    @asynccontextmanager
    async def first(self, why: str) -> AsyncIterator[None]:
        """Hold the lock; whoever gives way is told to end, and why."""
        self._first += 1
        if self._cut is not None and not self._cut.done():
            self._cut.set_result(why)
        try:
            async with self._lock:
                yield
        finally:
            self._first -= 1

    @asynccontextmanager
    async def last(self) -> AsyncIterator[asyncio.Future[str]]:
        """Hold the lock while nobody else wants it: the future is set when somebody does."""
        while True:
            async with self._lock:
                if not self._first:
                    self._cut = asyncio.get_running_loop().create_future()
                    try:
                        yield self._cut
                    finally:
                        self._cut = None
                    return
            await asyncio.sleep(0)  # the one that goes first may be about to be cancelled
