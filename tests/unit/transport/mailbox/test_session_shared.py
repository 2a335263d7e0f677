"""A session that hands arrays over in shared memory: cut, resumed without it, out of turn."""

from __future__ import annotations

import os

import pytest
from msgspec.structs import replace
from tests.helpers.groups import finished
from tests.helpers.session_ends import MUCH, RUNS, SIZES, End, frames_of, large, sharing, take_all

from ratchet.errors import ProtocolError
from ratchet.transport.mailbox.codec import decode_body, unpack_link
from ratchet.transport.mailbox.frames import BULK, CONTROL, Ack, Shared, Tell
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.peer_files import PeerFiles
from ratchet.transport.mailbox.shared import Loan


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
