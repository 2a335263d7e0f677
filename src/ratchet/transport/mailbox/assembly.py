"""Joins the pieces of a long envelope. Pure.

Consumes pieces in order, produces the envelope. What has come so far is copied once, piece by
piece, to where it stays.
"""

from __future__ import annotations

from io import BytesIO

from ratchet.errors import ProtocolError
from ratchet.transport.mailbox.blobs import LEAST_BYTES
from ratchet.transport.mailbox.codec import decode_envelope
from ratchet.transport.mailbox.frames import Envelope, Part, Shared
from ratchet.transport.mailbox.peer_files import PeerFiles


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
        _check_size(self._num_bytes, self._limit)
        self._open.write(part.data)
        if part.more and not part.cut:
            return None
        # BytesIO gives its buffer away without copying it
        section, self._open = self._open.getvalue(), BytesIO()
        if self._whole:
            _check_array(len(section))
        self._whole.append(section)
        return None if part.more else decode_envelope(self._whole[0], self._whole[1:])


def decode_shared(frame: Shared, files: PeerFiles, limit: int) -> Envelope:
    """Return the envelope of a frame, its arrays views of the peer's files; all together have at
    most `limit` bytes.

    Raises:
        Unreadable: a file is out of reach.
        ProtocolError: too long, not an envelope, or a file is not what the peer says.
    """
    _check_size(frame.num_bytes, limit)
    for place in frame.places:
        _check_array(place.num_bytes)
    arrays = files.arrays(frame.files, frame.places)
    if not arrays:
        raise ProtocolError("nothing is shared")
    body, arrays = (frame.body, arrays) if frame.body else (arrays[0], arrays[1:])
    return decode_envelope(body, arrays)


def _check_size(num_bytes: int, limit: int) -> None:
    if num_bytes > limit:
        raise ProtocolError(f"a message exceeds {limit} bytes")


def _check_array(num_bytes: int) -> None:
    if num_bytes < LEAST_BYTES:
        raise ProtocolError(f"an array of {num_bytes} bytes came beside its message")
