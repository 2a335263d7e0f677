"""A stream of bytes, cut into frames. Pure.

Consumes bytes as they come, produces whole frames; refuses a frame by its announced length, before
there is room for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ratchet.errors import ProtocolError
from ratchet.transport.mailbox.codec import HEADER_BYTES

_LEAST: Final = 8
"""What is held moves to the front when less than this part of the buffer is free behind it."""


class FrameReader:
    """Cuts a stream of bytes into frames. The buffer grows to the frame announced, once that is
    within the limit, and never beyond it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = memoryview(bytearray(limit + HEADER_BYTES))
        self._start = 0
        self._end = 0

    def widen(self, limit: int, room: int) -> None:
        """Allow larger frames, and read up to `room` bytes at once: the peer has proved itself."""
        self._limit = limit
        self._make_room(room)

    @property
    def unread(self) -> memoryview:
        """What was not taken for a frame."""
        return self._buffer[self._start : self._end]

    def buffer(self) -> memoryview:
        """Return where the next bytes are to be written."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start and len(self._buffer) - self._end < len(self._buffer) // _LEAST:
            self._make_room(0)
        return self._buffer[self._end :]

    def _make_room(self, size: int) -> None:
        held = self._buffer[self._start : self._end]
        if size > len(self._buffer):
            # a new buffer, not a resized one: the event loop may still hold a view of the old
            self._buffer = memoryview(bytearray(size))
        self._buffer[: len(held)] = held
        self._start, self._end = 0, len(held)

    def written(self, num_bytes: int) -> Iterator[memoryview]:
        """Yield every frame that is complete now that `num_bytes` more bytes are there.

        A view, and what is decoded from it as `Raw`, is good until `buffer` is called again.

        Raises:
            ProtocolError: a frame is longer than the limit.
        """
        self._end += num_bytes
        while self._end - self._start >= HEADER_BYTES:
            body = self._start + HEADER_BYTES
            size = int.from_bytes(self._buffer[self._start : body], "big")
            if size > self._limit:
                raise ProtocolError(f"a frame of {size} bytes; the limit is {self._limit}")
            if self._end - body < size:
                if body + size > len(self._buffer):
                    self._make_room(HEADER_BYTES + size)
                return
            self._start = body + size
            yield self._buffer[body : body + size]
