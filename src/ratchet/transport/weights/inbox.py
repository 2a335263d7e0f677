"""The buckets on their way from a transport's thread to the event loop.

Consumes buckets from the thread, hands them to `finalize`. The loop waits for the next bucket,
unblocked by the thread's put or its end; the thread waits for room in the staging memory, unblocked
by a release, by `drain`, or by its deadline.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ratchet.errors import TransferFailed
from ratchet.transport.weights.finalize import Arrived

if TYPE_CHECKING:
    from ratchet.transport.weights.deadline import Deadline


class EngineStuck(TransferFailed):
    """The engine at this end does not take what arrives: to meet again would not help."""


class Inbox:
    """The `Arrivals` of one transfer, made on the event loop."""

    def __init__(
        self,
        num_buckets: int,
        staging: Sequence[int],
        hand_over: Callable[[], Callable[[], None]],
    ) -> None:
        """Hold nothing yet.

        Args:
            num_buckets: that come.
            staging: sizes of the buffers that they are received into.
            hand_over: parts with these buffers.
        """
        self._num_buckets = num_buckets
        self.staging = staging
        self.room = len(staging)
        self.is_whole = len(staging) == num_buckets
        """each bucket has a buffer of its own"""
        self.hand_over = hand_over
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Arrived | bytes | BaseException] = asyncio.Queue()
        self._room = threading.Semaphore(self.room)
        self.has = 0
        """parts that were handed over: the buckets, in order, and the trailer; of the thread"""

    # --- on the thread

    def wait_for_room(self, deadline: Deadline) -> None:
        """Wait until one of the staging buffers is free.

        Raises:
            EngineStuck: if the engine did not take the earlier buckets by the deadline.
        """
        if not self._room.acquire(timeout=deadline.left_s):
            msg = f"the engine did not take a bucket within {deadline.timeout_s:.3g} s"
            raise EngineStuck(msg)

    def return_room(self) -> None:
        """Free the staging buffer that was waited for: nothing new is in it."""
        self._room.release()

    def put_bucket(self, arrived: Arrived) -> None:
        """Hand the next bucket over."""
        self._put(arrived)
        self.has += 1

    def put_trailer(self, trailer: bytes) -> None:
        """Hand the last part over."""
        self._put(trailer)
        self.has += 1

    def _put(self, item: Arrived | bytes) -> None:
        self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    # --- on the event loop

    async def bucket(self) -> Arrived:
        """Return the next bucket."""
        item = await self._next()
        if isinstance(item, bytes):
            msg = "the trailer came before the last bucket"
            raise TransferFailed(msg)
        return item

    async def trailer(self) -> bytes:
        """Return the trailer."""
        item = await self._next()
        if not isinstance(item, bytes):
            msg = "a bucket came in the place of the trailer"
            raise TransferFailed(msg)
        return item

    def release(self, arrived: Arrived) -> None:
        """Give the oldest staging buffer back."""
        del arrived
        self._room.release()

    def drain(self) -> None:
        """Drop what is still to come; the thread goes on to the end of the transfer."""
        self._room.release(self._num_buckets + 1)

    def ended(self, taken: asyncio.Future[None]) -> None:
        """Pass the thread's error on, if it ended with one."""
        error = None if taken.cancelled() else taken.exception()
        if error is not None:
            self._items.put_nowait(error)

    async def _next(self) -> Arrived | bytes:
        item = await self._items.get()
        if isinstance(item, BaseException):
            raise item
        return item
