from __future__ import annotations

import pytest
from tests.helpers.nodes import feed

from ratchet.errors import ProtocolError
from ratchet.transport.mailbox.reader import FrameReader


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


BODIES = [b"", b"a", b"x" * 40, b"bc", b"y" * 63, b"z" * 64]
STREAM = b"".join(map(framed, BODIES))


@pytest.mark.parametrize("chunk", range(1, len(STREAM) + 1))
def test_frames_come_out_however_the_stream_is_cut(chunk: int) -> None:
    reader = FrameReader(64)
    out = []
    for at in range(0, len(STREAM), chunk):
        out += feed(reader, STREAM[at : at + chunk])
    assert out == BODIES


@pytest.mark.parametrize("size", [65, 2**31, 2**32 - 1])
def test_a_frame_over_the_limit_is_refused_by_its_length_alone(size: int) -> None:
    reader = FrameReader(64)
    with pytest.raises(ProtocolError, match=f"{size} bytes; the limit is 64"):
        feed(reader, size.to_bytes(4, "big"))
    assert len(reader._buffer) == 68


def test_a_wider_reader_keeps_what_it_has_begun() -> None:
    reader = FrameReader(8)
    body = b"w" * 100_000
    assert feed(reader, framed(b"last") + framed(body)[:3]) == [b"last"]
    reader.widen(1 << 20, 1 << 10)
    assert feed(reader, framed(body)[3:]) == [body]
    assert len(reader._buffer) == len(body) + 4


def test_the_frames_read_before_a_broken_one_count() -> None:
    reader = FrameReader(64)
    out = []
    reader.buffer()[:9] = framed(b"a") + (99).to_bytes(4, "big")
    frames = reader.written(9)
    out.append(bytes(next(frames)))
    with pytest.raises(ProtocolError):
        next(frames)
    assert out == [b"a"]
