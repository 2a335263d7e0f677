"""Joins the pieces of a long envelope. Pure.

Consumes pieces in order, produces the envelope. What has come so far is copied once, piece by
piece, to where it stays.
"""

from __future__ import annotations

from io import BytesIO

from ratchet.errors import ProtocolError
from ratchet.transport.mailbox.blobs import ARRAY_BYTES
from ratchet.transport.mailbox.codec import Envelope, Part, decode_envelope


class Assembly:
    """One envelope and the arrays beside it; all together have at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_bytes = 0
        self._whole: list[bytes] = []
        self._open = BytesIO()

    def add(self, part: Part) -> Envelope | None:
        """Take the next piece; return the envelope if it was the last one.

        Raises:
            ProtocolError: too long, or not an envelope.
        """
        self._num_bytes += len(part.data)
        if self._num_bytes > self._limit:
            raise ProtocolError(f"a message exceeds {self._limit} bytes")
        self._open.write(part.data)
        if part.more and not part.cut:
            return None
        # BytesIO gives its buffer away without copying it
        section, self._open = self._open.getvalue(), BytesIO()
        if self._whole and len(section) < ARRAY_BYTES:
            raise ProtocolError(f"an array of {len(section)} bytes came beside its message")
        self._whole.append(section)
        return None if part.more else decode_envelope(self._whole[0], self._whole[1:])
