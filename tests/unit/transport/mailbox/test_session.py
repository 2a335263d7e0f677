"""The session, cut at every byte, resumed, repeated, reordered and filled up."""

from __future__ import annotations

import itertools
import os
import random
from concurrent.futures import Future

import pytest
from msgspec.structs import replace
from tests.helpers.groups import finished
from tests.helpers.nodes import feed

from ratchet.errors import ProtocolError
from ratchet.transport.mailbox.blobs import ARRAY_BYTES
from ratchet.transport.mailbox.codec import (
    decode_body,
    decode_envelope,
    encode_note,
    encode_parcel,
    unpack_link,
)
from ratchet.transport.mailbox.flight import Item
from ratchet.transport.mailbox.frames import (
    BULK,
    CONTROL,
    Ack,
    Data,
    Envelope,
    Failure,
    Part,
    Shared,
    Tell,
)
from ratchet.transport.mailbox.lane import Copy
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.peer_files import PeerFiles
from ratchet.transport.mailbox.reader import FrameReader
from ratchet.transport.mailbox.session import Session
from ratchet.transport.mailbox.shared import SHARED_BYTES, Loan

LIMITS = Limits(fragment_bytes=24, window_messages=4, window_bytes=400, message_bytes=200)


def note(number: int, size: int = 0) -> bytes:
    return encode_note(Failure(number, "k", "x" * size))


class End:
    """One end of a link: a session, and a reader for each connection."""

    def __init__(self, name: str, limits: Limits = LIMITS) -> None:
        self.name = name
        self.session = Session(f"{name}1", limits)
        self.reader = FrameReader(1 << 16)
        self.got: list[int] = []
        self.numbers = itertools.count()

    def push(self, lane: int, size: int = 0, deadline: float = 1.0) -> int:
        number = next(self.numbers)
        assert self.session.push(lane, Item(note(number, size), deadline))
        return number

    def pull(self) -> bytes:
        out = bytearray()
        while (frame := self.session.pull()) is not None:
            out += frame
        if self.session.owes:
            out += self.session.ack()
        return bytes(out)

    def take(self, data: bytes) -> None:
        for frame in feed(self.reader, data):
            link_frame = unpack_link(frame)
            assert isinstance(link_frame, Data | Part | Ack)
            self.got += [number(e) for e in self.session.receive(link_frame, len(frame))]


def number(envelope: Envelope) -> int:
    assert isinstance(envelope, Failure)
    return envelope.ask_id


def connect(a: End, b: End) -> None:
    """What the hello does: a new connection, on which both go on where the other is."""
    a.reader, b.reader = FrameReader(1 << 16), FrameReader(1 << 16)
    delivered = {
        end.name: end.session.delivered_of(far.session.life) for end, far in ((a, b), (b, a))
    }
    for end, far in ((a, b), (b, a)):
        end.session.resume(far.session.life, delivered[far.name])


def talk(a: End, b: End) -> int:
    """Exchange until both are silent; return how many bytes a has sent."""
    total = 0
    while True:
        from_a, from_b = a.pull(), b.pull()
        total += len(from_a)
        if not from_a and not from_b:
            return total
        b.take(from_a)
        a.take(from_b)


def pair(limits: Limits = LIMITS) -> tuple[End, End]:
    a, b = End("a", limits), End("b", limits)
    connect(a, b)
    return a, b


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


def test_the_window_bounds_what_is_unacknowledged_by_number() -> None:
    a, b = pair()
    for _ in range(10):
        a.push(CONTROL)
    data = a.pull()
    assert a.session.num_in_flight == 4
    assert a.session.num_queued == 6
    assert a.session.pull() is None
    b.take(data)
    a.take(b.pull())
    assert a.session.num_in_flight == 0
    talk(a, b)
    assert b.got == list(range(10))


def test_the_window_bounds_what_is_unacknowledged_by_size() -> None:
    limits = Limits(window_bytes=100)
    a, b = pair(limits)
    for _ in range(5):
        a.push(BULK, 40)
    a.pull()
    assert a.session.num_in_flight == 2
    del b


def test_an_empty_window_takes_what_is_larger_than_itself() -> None:
    a, b = pair(Limits(window_bytes=10))
    a.push(BULK, 500)
    talk(a, b)
    assert b.got == [0]


def test_a_full_bulk_window_does_not_hold_up_control() -> None:
    a, b = pair()
    for _ in range(20):
        a.push(BULK)
    a.pull()
    control = a.push(CONTROL)
    b.take(a.pull())
    assert b.got[-1] == control
    assert a.session.num_queued == 16


def test_control_goes_between_the_fragments_of_a_long_message() -> None:
    a, b = pair(Limits(fragment_bytes=24))
    long = a.push(BULK, 180)
    pulled = a.session.pull()
    assert pulled is not None
    b.take(bytes(pulled))
    short = a.push(CONTROL)
    b.take(a.pull())
    assert b.got == [short, long]


def test_a_full_queue_takes_no_more() -> None:
    a = Session("a1", Limits(queue_messages=2))
    assert a.push(CONTROL, Item(note(0), 1.0))
    assert a.push(CONTROL, Item(note(1), 1.0))
    assert not a.push(CONTROL, Item(note(2), 1.0))
    assert a.push(BULK, Item(note(3), 1.0))
    small = Session("a1", Limits(queue_bytes=40))
    assert small.push(CONTROL, Item(note(0, 20), 1.0))
    assert not small.push(CONTROL, Item(note(1, 20), 1.0))


def test_what_waits_past_its_deadline_comes_out_once() -> None:
    a, b = pair()
    for deadline in (1.0, 1.0, 2.0):
        a.push(CONTROL, deadline=deadline)
    assert a.session.expire(0.9) == []
    late = a.session.expire(1.0)
    assert [number(decode_envelope(item.body)) for item in late] == [0, 1]
    assert a.session.expire(1.5) == []
    talk(a, b)
    assert b.got == [2]


def test_what_is_begun_does_not_expire() -> None:
    a, b = pair()
    long = a.push(BULK, 180)
    late = a.push(BULK)
    a.session.pull()
    assert [number(decode_envelope(item.body)) for item in a.session.expire(9.0)] == [late]
    connect(a, b)
    talk(a, b)
    assert b.got == [long]


def test_the_room_of_what_expires_is_free_again() -> None:
    session = Session("a1", Limits(queue_bytes=40))
    assert session.push(CONTROL, Item(note(0, 20), 1.0))
    session.expire(1.0)
    assert session.push(CONTROL, Item(note(1, 20), 1.0))


def test_the_end_of_a_life_gives_back_what_the_peer_does_not_have() -> None:
    a, b = pair()
    for size in (0, 60, 0):
        a.push(BULK, size)
    a.push(CONTROL)
    first = a.session.pull()
    assert first is not None
    b.take(bytes(first))
    assert b.got == [3]
    a.take(bytes(b.session.ack()))
    a.pull()
    lost = a.session.end("a2")
    assert [number(decode_envelope(item.body)) for item in lost] == [0, 1, 2]
    assert a.session.idle
    assert a.session.peer_life is None


def test_what_is_begun_is_given_back_once() -> None:
    a, _ = pair()
    a.push(BULK, 180)
    a.push(BULK)
    a.pull()
    lost = a.session.end("a2")
    assert [number(decode_envelope(item.body)) for item in lost] == [0, 1]


def test_what_is_acknowledged_is_not_sent_again() -> None:
    a, b = pair(Limits())
    for _ in range(3):
        a.push(CONTROL)
    b.take(a.pull())
    a.session.resume("b1", (0, 0))
    a.take(b.pull())  # the ack comes after all, before anything is repeated
    assert a.pull() == b""
    del b


def test_what_arrived_counts_for_one_life_only() -> None:
    a, b = pair()
    a.push(BULK, 50)
    b.take(a.pull())
    assert b.session.delivered_of("a1") == b.session.delivered == (0, 3)
    assert b.session.delivered_of("a2") == (0, 0)


def test_a_peer_that_claims_what_was_never_sent_is_refused() -> None:
    a, _ = pair()
    with pytest.raises(ProtocolError, match="acknowledges piece 3; the last one sent is 0"):
        a.session.resume("b1", (0, 3))


def test_a_new_life_of_the_peer_gets_only_what_was_sent_to_it() -> None:
    a, b = pair()
    a.push(CONTROL)
    a.pull()
    b = End("b")
    b.session.end("b2")
    assert a.session.knows_other("b2")
    assert [number(decode_envelope(i.body)) for i in a.session.end(a.session.life)] == [0]
    a.push(CONTROL)
    connect(a, b)
    talk(a, b)
    assert b.got == [1]


def test_a_session_does_not_change_its_peer_unasked() -> None:
    a, _ = pair()
    with pytest.raises(ValueError, match="does not change"):
        a.session.resume("b2", (0, 0))


def test_what_was_queued_before_the_first_connection_is_sent() -> None:
    a, b = End("a"), End("b")
    a.push(CONTROL)
    connect(a, b)
    talk(a, b)
    assert b.got == [0]


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


def test_a_quarter_of_the_window_is_much_to_owe() -> None:
    a, b = pair(Limits(window_messages=16, window_bytes=1 << 20))
    for owed in range(1, 5):
        a.push(CONTROL)
        b.take(a.pull())
        assert b.session.owes_much == (owed >= 4)
    c, d = pair(Limits(window_bytes=400))
    c.push(BULK, 60)
    d.take(c.pull())
    assert not d.session.owes_much
    c.push(BULK, 60)
    d.take(c.pull())
    assert d.session.owes_much


def large(number: int, *sizes: int) -> Item:
    message = finished(*(size // 4 for size in sizes))
    body, arrays = encode_parcel(Tell(str(number), "b", None, None, message))
    return Item(body, 1.0, arrays)


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


def test_what_comes_alone_passes_the_queue_and_nothing_else_does() -> None:
    a, b = pair()
    frame = a.session.pass_through(CONTROL, Item(note(0), 1.0))
    assert frame is not None
    b.take(frame)
    assert b.got == [0]
    assert a.session.num_in_flight == 1
    assert a.session.pass_through(CONTROL, Item(note(1, 30), 1.0)) is None  # long
    a.session.push(BULK, Item(note(2), 1.0))
    assert a.session.pass_through(CONTROL, Item(note(3), 1.0)) is None  # behind another
    a.pull()
    for each in range(4, 7):
        assert a.session.pass_through(CONTROL, Item(note(each), 1.0)) is not None
    assert a.session.pass_through(CONTROL, Item(note(7), 1.0)) is None  # the window is full
    a.session.resume("b1", (1, 0))
    assert a.session.pass_through(CONTROL, Item(note(8), 1.0)) is None  # to be repeated first


# --- arrays in shared memory


def sharing(a: End, b: End, *, shares: bool = True, copy: Copy | None = None) -> None:
    """A new connection of two processes of one host, or of two hosts."""
    for end in (a, b):
        files = PeerFiles(os.getpid()) if shares else None
        end.session.share(lends=shares, files=files, copy=copy)
    connect(a, b)


def take_all(b: End, data: bytes) -> list[Envelope]:
    got: list[Envelope] = []
    for frame in feed(b.reader, data):
        link_frame = unpack_link(frame)
        assert isinstance(link_frame, Data | Part | Shared | Ack)
        got += b.session.receive(link_frame, len(frame))
    return got


MUCH = 4 * SHARED_BYTES
RUNS = Limits(fragment_bytes=60_000, window_bytes=3 * MUCH)
SIZES = (MUCH - 100_000, 40, ARRAY_BYTES + 100_000)


@pytest.mark.parametrize("shares_again", [True, False])
@pytest.mark.parametrize("shares_first", [True, False])
def test_shared_arrays_survive_a_cut_at_every_frame(
    *, shares_first: bool, shares_again: bool
) -> None:
    sent = [finished(*(size // 4 for size in SIZES)), finished(0), finished(SIZES[0] // 4)]
    for num_frames in range(0, 5 if shares_first else 40, 1 if shares_first else 5):
        a, b = End("a", RUNS), End("b", RUNS)
        sharing(a, b, shares=shares_first)
        a.session.push(BULK, large(1, *SIZES))
        a.session.push(BULK, large(2, 0))
        a.session.push(BULK, large(3, SIZES[0]))
        pulled = b"".join(bytes(frame) for frame in frames_of(a)[:num_frames])
        got = take_all(b, pulled)
        sharing(a, b, shares=shares_again)
        while (data := a.pull()) or b.session.owes:
            got += take_all(b, data)
            a.take(b.pull())
        tells = [each for each in got if isinstance(each, Tell)]
        assert [tell.sender for tell in tells] == ["1", "2", "3"]
        assert [decode_body(tell.body, 64) for tell in tells] == sent
        assert a.session.idle
        assert a.session.num_in_flight == a.session._lanes[BULK].flight_bytes == 0
        assert b.session.num_duplicates == 0


def frames_of(a: End) -> list[bytes | bytearray]:
    return list(iter(a.session.pull, None))


def test_what_came_by_the_old_connection_is_not_taken_again_in_pieces() -> None:
    """The peer reads the whole of a message after it has said what it has."""
    a, b = End("a", RUNS), End("b", RUNS)
    sharing(a, b)
    a.session.push(BULK, large(1, *SIZES))
    late = a.pull()
    delivered = b.session.delivered
    assert len(take_all(b, late)) == 1
    a.session.share(lends=False, files=None)
    a.session.resume("b1", delivered)
    again = a.pull()
    assert len(again) > MUCH
    assert take_all(b, again) == []
    assert b.session.num_duplicates == b.session.delivered[BULK] > 30
    a.take(b.pull())
    assert a.session.idle


@pytest.mark.parametrize("shares_again", [True, False])
def test_a_long_envelope_is_shared_with_its_arrays(*, shares_again: bool) -> None:
    """As of a batch of many rollouts, whose small arrays stay in it."""
    sizes = (MUCH, *[1000] * 100)
    a, b = End("a", RUNS), End("b", RUNS)
    sharing(a, b)
    a.session.push(BULK, large(1, *sizes))
    assert sum(map(len, frames_of(a))) < 1000
    sharing(a, b, shares=shares_again)
    [tell] = take_all(b, b"".join(frames_of(a)))
    assert isinstance(tell, Tell)
    assert decode_body(tell.body, 64) == finished(*(size // 4 for size in sizes))
    a.take(b.pull())
    assert a.session.idle


def test_other_work_has_its_turn_while_arrays_are_copied() -> None:
    a, b = End("a", RUNS), End("b", RUNS)
    sharing(a, b)
    a.session.push(BULK, large(1, 2 * MUCH))
    assert a.session.pull() == b""
    control = a.push(CONTROL)
    frame = a.session.pull()
    assert frame
    b.take(bytes(frame))
    assert b.got == [control]
    assert a.session.expire(0.5) == []
    rest = frames_of(a)
    assert [len(each) < 2000 for each in rest] == [True] * len(rest)
    assert len(take_all(b, b"".join(rest))) == 1


def test_shared_bytes_count_in_the_window_and_ask_for_an_ack_at_once() -> None:
    a, b = End("a", RUNS), End("b", RUNS)
    sharing(a, b)
    for each in range(4):
        a.session.push(BULK, large(each, MUCH))
    assert len(take_all(b, b"".join(frames_of(a)))) == 1  # of 2 MiB; 3 MiB fit
    assert a.session.num_queued == 3
    assert b.session.owes_much
    a.take(b.pull())
    assert len(take_all(b, b"".join(frames_of(a)))) == 1


def test_what_is_not_acknowledged_of_shared_arrays_is_given_back() -> None:
    a, b = End("a", RUNS), End("b", RUNS)
    sharing(a, b)
    items = [large(1, *SIZES), large(2, *SIZES)]
    for item in items:
        a.session.push(BULK, item)
    a.session.pull()
    a.session.pull()
    assert a.session.end("a2") == items


def test_arrays_go_in_pieces_where_there_is_no_memory_to_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: Loan, num_bytes: int) -> bool:
        raise OSError("no room")

    a, b = End("a", RUNS), End("b", RUNS)
    sharing(a, b)
    a.session.push(BULK, large(1, *SIZES))
    monkeypatch.setattr(Loan, "fill", fail)
    [tell] = take_all(b, b"".join(frames_of(a)))
    assert isinstance(tell, Tell)
    assert decode_body(tell.body, 64) == finished(*(size // 4 for size in SIZES))


class Copier:
    """A thread that copies when it is told to."""

    def __init__(self) -> None:
        self.begun: list[tuple[Loan, Future[bool]]] = []

    def __call__(self, loan: Loan) -> Future[bool]:
        self.begun.append((loan, Future()))
        return self.begun[-1][1]

    def finish(self, index: int = -1) -> None:
        loan, future = self.begun[index]
        future.set_result(loan.fill(loan.num_bytes))


def test_only_what_stands_behind_it_waits_for_a_copy_on_a_thread() -> None:
    a, b, copier = End("a", RUNS), End("b", RUNS), Copier()
    sharing(a, b, copy=copier)
    a.session.push(BULK, large(1, MUCH))
    a.session.push(BULK, large(2, 0))
    a.session.push(BULK, large(3, SHARED_BYTES - 100))  # few: they are copied without a thread
    assert a.session.pull() is None
    control = a.push(CONTROL)
    b.take(a.pull())
    assert b.got == [control]
    assert a.session.pull() is None
    copier.finish()
    got = take_all(b, a.pull())
    assert [tell.sender for tell in got if isinstance(tell, Tell)] == ["1", "2", "3"]
    assert len(copier.begun) == 1


def test_the_next_one_is_copied_too_and_not_sent_before_its_turn() -> None:
    a, b, copier = End("a", RUNS), End("b", RUNS), Copier()
    sharing(a, b, copy=copier)
    for each in range(3):
        a.session.push(BULK, large(each, MUCH))
    assert a.session.pull() is None
    assert len(copier.begun) == 2
    copier.finish(1)
    assert a.session.pull() is None
    copier.finish(0)
    got = take_all(b, a.pull())  # the window has room for one
    assert len(copier.begun) == 3
    a.take(b.pull())
    got += take_all(b, a.pull())
    a.take(b.pull())
    assert a.session.pull() is None
    copier.finish()
    got += take_all(b, a.pull())
    assert [tell.sender for tell in got if isinstance(tell, Tell)] == ["0", "1", "2"]


def test_nothing_that_waits_is_harmed_where_it_cannot_be_copied_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b, copier = End("a", RUNS), End("b", RUNS), Copier()
    sharing(a, b, copy=copier)
    a.session.push(BULK, large(0, MUCH))
    assert a.session.pull() is None
    monkeypatch.setattr(os, "memfd_create", raise_no_room)
    a.session.push(BULK, large(1, MUCH // 2))
    assert a.session.pull() is None
    copier.finish()
    got, num_bytes = [], 0
    while data := a.pull():
        got += take_all(b, data)
        a.take(b.pull())
        num_bytes += len(data)
    assert len(copier.begun) == 1
    assert MUCH < num_bytes < 2 * MUCH
    assert [tell.sender for tell in got if isinstance(tell, Tell)] == ["0", "1"]


def raise_no_room(name: str, flags: int) -> int:
    raise OSError("no room")


def test_a_message_expires_while_it_is_copied() -> None:
    a, b, copier = End("a", RUNS), End("b", RUNS), Copier()
    sharing(a, b, copy=copier)
    late = large(1, MUCH)
    a.session.push(BULK, late)
    assert a.session.pull() is None
    assert a.session.expire(late.deadline) == [late]
    a.session.push(BULK, large(2, MUCH))
    copier.finish()
    assert a.session.pull() is None
    copier.finish()
    [tell] = take_all(b, a.pull())
    assert isinstance(tell, Tell)
    assert tell.sender == "2"


@pytest.mark.parametrize("shares_again", [True, False])
def test_a_cut_finds_a_message_half_copied(*, shares_again: bool) -> None:
    a, b, copier = End("a", RUNS), End("b", RUNS), Copier()
    sharing(a, b, copy=copier)
    item = large(1, MUCH)
    a.session.push(BULK, item)
    assert a.session.pull() is None
    sharing(a, b, shares=shares_again, copy=copier)
    assert (a.session.pull() is None) == shares_again
    sharing(a, b, shares=shares_again, copy=copier)
    copier.finish()
    [tell] = take_all(b, a.pull())
    assert isinstance(tell, Tell)
    assert decode_body(tell.body, 64) == finished(MUCH // 4)
    assert len(copier.begun) == 1
    assert item.loan is None


def test_a_copy_that_fails_while_the_window_is_full_is_not_tried_again() -> None:
    a, b, copier = End("a", RUNS), End("b", RUNS), Copier()
    sharing(a, b, copy=copier)
    for each in range(2):
        a.session.push(BULK, large(each, MUCH + MUCH // 2))  # the window is full of one
    assert a.session.pull() is None
    copier.finish(0)
    data = a.pull()
    copier.begun[1][1].set_exception(OSError("no room"))
    data += a.pull()
    got = take_all(b, data)
    assert len(got) == 1
    for _ in range(3):
        a.take(b.pull())
        got += take_all(b, a.pull())
    assert [tell.sender for tell in got if isinstance(tell, Tell)] == ["0", "1"]
    assert len(copier.begun) == 2


def test_a_copy_that_fails_is_sent_in_pieces() -> None:
    a, b, copier = End("a", RUNS), End("b", RUNS), Copier()
    sharing(a, b, copy=copier)
    a.session.push(BULK, large(1, MUCH))
    assert a.session.pull() is None
    copier.begun[0][1].set_exception(OSError("no room"))
    pieces = a.pull()
    assert len(pieces) > MUCH
    [tell] = take_all(b, pieces)
    assert isinstance(tell, Tell)
    assert decode_body(tell.body, 64) == finished(MUCH // 4)


def test_a_shared_message_out_of_turn_ends_the_link() -> None:
    a, b = End("a", RUNS), End("b", RUNS)
    sharing(a, b)
    a.session.push(BULK, large(1, *SIZES))
    [frame] = [unpack_link(bytes(each[4:])) for each in frames_of(a) if each]
    assert isinstance(frame, Shared)
    for changes in ({"count": 0}, {"count": 1 << 40}, {"seq": 2}, {"lane": 2}):
        with pytest.raises(ProtocolError):
            b.session.receive(replace(frame, **changes), 0)
    with pytest.raises(ProtocolError, match="array of 5 bytes"):
        b.session.receive(
            replace(frame, places=[replace(place, num_bytes=5) for place in frame.places]), 0
        )
    for changes in ({"places": []}, {"places": frame.places[:1], "body": b""}):
        with pytest.raises(ProtocolError, match=r"nothing is shared|not an envelope"):
            b.session.receive(replace(frame, **changes), 0)
    tight = End("b", Limits(message_bytes=MUCH))
    tight.session.share(lends=True, files=PeerFiles(os.getpid()))
    with pytest.raises(ProtocolError, match="exceeds"):
        tight.session.receive(frame, 0)
    with pytest.raises(ProtocolError, match="out of turn"):
        End("b", RUNS).session.receive(frame, 0)  # it has not said that it can read
    assert len(b.session.receive(frame, 0)) == 1
    with pytest.raises(ProtocolError, match="out of turn"):
        b.session.receive(replace(frame, count=frame.count + 1), 0)
    with pytest.raises(ProtocolError, match="a part of what it has whole"):
        a.session.receive(Ack((0, 1)), 0)
