from __future__ import annotations

import pytest

from ratchet.errors import ProtocolError
from ratchet.messages import AbortLoad
from ratchet.transport.mailbox.assembly import Assembly
from ratchet.transport.mailbox.blobs import ARRAY_BYTES
from ratchet.transport.mailbox.codec import decode_body, encode_envelope
from ratchet.transport.mailbox.frames import Part, Tell


def part(data: bytes, *, more: bool, cut: bool = False) -> Part:
    return Part((0, 0), 1, 1, more, memoryview(data), cut)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_pieces_become_the_envelope_that_they_are_of(size: int) -> None:
    whole = encode_envelope(Tell("a", "b", None, None, AbortLoad(1, 2, "x" * 50)))
    assembly = Assembly(1000)
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    for piece in pieces[:-1]:
        assert assembly.add(part(piece, more=True)) is None
    envelope = assembly.add(part(pieces[-1], more=False))
    assert isinstance(envelope, Tell)
    assert decode_body(envelope.body, 64) == AbortLoad(1, 2, "x" * 50)


def test_a_piece_is_copied_before_its_buffer_is_used_again() -> None:
    whole = encode_envelope(Tell("a", "b", None, None, AbortLoad(1, 2, "x")))
    buffer = bytearray(whole[:5])
    assembly = Assembly(1000)
    assembly.add(Part((0, 0), 1, 1, True, memoryview(buffer)))
    buffer[:] = b"?????"
    assert isinstance(assembly.add(part(whole[5:], more=False)), Tell)


def test_the_limit_is_for_all_pieces_together() -> None:
    assembly = Assembly(2 * ARRAY_BYTES)
    assembly.add(part(b"x" * 10, more=True, cut=True))
    assembly.add(part(b"x" * ARRAY_BYTES, more=True, cut=True))
    with pytest.raises(ProtocolError, match=f"exceeds {2 * ARRAY_BYTES} bytes"):
        assembly.add(part(b"x" * ARRAY_BYTES, more=True))


def test_a_peer_cannot_make_many_objects_of_few_bytes() -> None:
    assembly = Assembly(1 << 20)
    assembly.add(part(b"", more=True, cut=True))
    with pytest.raises(ProtocolError, match="an array of 1 bytes came beside its message"):
        assembly.add(part(b"x", more=True, cut=True))
