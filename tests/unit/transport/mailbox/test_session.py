"""The session, cut at every byte, resumed and repeated; and what breaks its protocol."""

from __future__ import annotations

import random

import pytest
from tests.helpers.groups import finished
from tests.helpers.nodes import feed
from tests.helpers.session_ends import End, connect, large, number, pair, talk

from ratchet.errors import ProtocolError
from ratchet.transport.mailbox.blobs import ARRAY_BYTES
from ratchet.transport.mailbox.codec import decode_body, decode_envelope, unpack_link
from ratchet.transport.mailbox.frames import BULK, CONTROL, Ack, Data, Envelope, Failure, Part, Tell
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.reader import FrameReader


def fill(a: End, b: End) -> tuple[list[int], list[int]]:
    """Queue short and long envelopes both ways; return what a sends, by lane."""
    lanes: tuple[list[int], list[int]] = ([], [])
    for size in (0, 3, 100, 0, 30, 60, 1):
        lanes[CONTROL].append(a.push(CONTROL, size))
        lanes[BULK].append(a.push(BULK, size))
        b.push(CONTROL, size)
    return lanes


def in_lane(got: list[int], lane: list[int]) -> list[int]:
    return [each for each in got if each in set(lane)]


def assert_all_arrived(a: End, b: End, lanes: tuple[list[int], list[int]]) -> None:
    assert len(b.got) == len(set(b.got)) == 14
    for lane in lanes:
        assert in_lane(b.got, lane) == lane
    assert a.got == list(range(7))
    assert a.session.idle
    assert b.session.idle


def test_everything_arrives_once_and_in_order() -> None:
    a, b = pair()
    lanes = fill(a, b)
    talk(a, b)
    assert_all_arrived(a, b, lanes)
    assert b.session.num_duplicates == 0


def run_until_cut(a: End, b: End, cut_a: int, cut_b: int) -> None:
    """Exchange until the connection breaks, after `cut_a` bytes from a or `cut_b` from b."""
    while True:
        from_a, from_b = a.pull(), b.pull()
        if not from_a and not from_b:
            return
        b.take(from_a[:cut_a])
        a.take(from_b[:cut_b])
        if len(from_a) > cut_a or len(from_b) > cut_b:
            return
        cut_a -= len(from_a)
        cut_b -= len(from_b)


def test_a_cut_at_every_byte_loses_and_doubles_nothing() -> None:
    a, b = pair()
    fill(a, b)
    num_bytes = talk(a, b)
    assert num_bytes > 700
    for cut in range(num_bytes + 1):
        a, b = pair()
        lanes = fill(a, b)
        run_until_cut(a, b, cut, 1 << 30)
        connect(a, b)
        talk(a, b)
        assert_all_arrived(a, b, lanes)


def test_many_cuts_in_both_directions_lose_and_double_nothing() -> None:
    rng = random.Random(0)
    for _ in range(300):
        a, b = pair()
        lanes = fill(a, b)
        for _ in range(rng.randrange(1, 6)):
            run_until_cut(a, b, rng.randrange(300), rng.randrange(100))
            connect(a, b)
        talk(a, b)
        assert_all_arrived(a, b, lanes)


def test_pieces_that_come_twice_are_counted_and_dropped() -> None:
    a, b = pair()
    a.push(CONTROL)
    a.push(BULK, 50)
    data = a.pull()
    b.take(data)
    num_pieces = sum(b.session.delivered)
    b.reader = FrameReader(1 << 16)
    b.take(data)
    assert b.got == [0, 1]
    assert b.session.num_duplicates == num_pieces > 2


def test_a_resent_batch_is_taken_from_where_it_is_new() -> None:
    a, b = pair(Limits())
    a.push(CONTROL)
    first = a.pull()
    b.take(first)
    a.push(CONTROL)
    a.session.resume("b1", (0, 0))  # the ack was lost with the connection
    b.take(a.pull())
    assert b.got == [0, 1]
    assert b.session.num_duplicates == 1


def frames(data: bytes) -> list[Data | Part | Ack]:
    out = []
    for frame in feed(FrameReader(1 << 16), data):
        link_frame = unpack_link(frame)
        assert isinstance(link_frame, Data | Part | Ack)
        out.append(link_frame)
    return out


def test_a_gap_ends_the_session() -> None:
    a, b = pair()
    for size in (30, 30):
        a.push(CONTROL, size)
    first, second, *_ = frames(a.pull())
    with pytest.raises(ProtocolError, match="piece 2 follows on piece 0"):
        b.session.receive(second, 0)
    assert b.session.delivered == (0, 0)
    del first


@pytest.mark.parametrize(
    "frame",
    [
        Data((0, 0), CONTROL, 0, [Failure(1, "", "")]),
        Data((0, 0), CONTROL, -5, [Failure(1, "", "")]),
        Data((0, 0), 2, 1, []),
        Data((0, 0), -1, 1, []),
        Ack((1, 0)),
        Ack((0, 9)),
        Part((0, 0), BULK, 1, False, b"\xc1"),
        Part((0, 0), BULK, 1, False, b""),
        Part((0, 0), BULK, 1, True, b"x" * 201),
    ],
)
def test_what_breaks_the_protocol_is_refused(frame: Data | Part | Ack) -> None:
    _, b = pair()
    with pytest.raises(ProtocolError):
        b.session.receive(frame, 0)


def test_an_envelope_in_the_middle_of_another_is_refused() -> None:
    _, b = pair()
    b.session.receive(Part((0, 0), BULK, 1, True, b"x"), 0)
    with pytest.raises(ProtocolError, match="cut short"):
        b.session.receive(Data((0, 0), BULK, 2, [Failure(1, "", "")]), 0)


def test_parts_that_never_end_are_bounded() -> None:
    _, b = pair()
    for seq in range(1, 9):
        b.session.receive(Part((0, 0), BULK, seq, True, b"x" * 25), 0)
    with pytest.raises(ProtocolError, match="exceeds 200 bytes"):
        b.session.receive(Part((0, 0), BULK, 9, True, b"x"), 0)


def test_what_is_acknowledged_is_not_sent_again() -> None:
    a, b = pair(Limits())
    for _ in range(3):
        a.push(CONTROL)
    b.take(a.pull())
    a.session.resume("b1", (0, 0))
    a.take(b.pull())  # the ack comes after all, before anything is repeated
    assert a.pull() == b""
    del b


def test_acks_ride_on_data() -> None:
    a, b = pair()
    a.push(CONTROL)
    b.take(a.pull())
    assert b.session.owes
    b.push(CONTROL)
    pulled = b.session.pull()
    assert pulled is not None
    assert not b.session.owes
    a.take(bytes(pulled))
    assert a.session.idle


def test_arrays_beside_a_message_survive_a_cut_at_every_piece() -> None:
    limits = Limits(fragment_bytes=20_000, window_bytes=90_000)
    sizes = (ARRAY_BYTES, 40, ARRAY_BYTES + 20_000)
    for cut in range(0, 240_000, 9_001):
        a, b = pair(limits)
        a.session.push(BULK, large(1, *sizes))
        a.session.push(BULK, large(2, 0))
        control = a.push(CONTROL)
        got: list[Envelope] = []

        def take(data: bytes, b: End = b, got: list[Envelope] = got) -> None:
            for frame in feed(b.reader, data):
                link_frame = unpack_link(frame)
                assert isinstance(link_frame, Data | Part | Ack)
                got += b.session.receive(link_frame, len(frame))

        take(a.pull()[:cut])
        connect(a, b)
        while (data := a.pull()) or b.session.owes:
            take(data)
            a.take(b.pull())
        assert isinstance(got[0], Failure)
        assert number(got[0]) == control
        tells = [each for each in got if isinstance(each, Tell)]
        assert [tell.sender for tell in tells] == ["1", "2"]
        assert decode_body(tells[0].body, 64) == finished(*(size // 4 for size in sizes))
        assert len(got) == 3
        assert a.session.idle
        assert a.session.num_in_flight == 0


def test_what_is_begun_of_a_message_with_arrays_is_given_back_whole() -> None:
    a, _ = pair(Limits(fragment_bytes=20_000))
    item = large(1, ARRAY_BYTES)
    a.session.push(BULK, item)
    for _ in range(3):
        a.session.pull()
    assert a.session.expire(9.0) == []
    [lost] = a.session.end("a2")
    assert lost is item
    envelope = decode_envelope(lost.body, lost.arrays)
    assert isinstance(envelope, Tell)
    assert envelope.body == finished(ARRAY_BYTES // 4)


def test_an_ack_in_the_middle_of_a_frame_leaves_its_rest() -> None:
    a, b = pair(Limits())
    for _ in range(5):
        a.push(CONTROL)
    a.pull()
    assert a.session.num_in_flight == 5
    a.session.resume("b1", (3, 0))
    assert a.session.num_in_flight == 2
    [again] = frames(a.pull())
    assert isinstance(again, Data)
    assert again.seq == 4
    assert [number(each) for each in again.items] == [3, 4]
    a.session.receive(Ack((4, 0)), 0)
    assert [number(decode_envelope(item.body)) for item in a.session.end("a2")] == [4]
    assert a.session._lanes[CONTROL].flight_bytes == 0
    del b
