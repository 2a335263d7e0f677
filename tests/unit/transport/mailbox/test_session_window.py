"""What a session sends first and what waits: windows, lanes, queues, deadlines."""

from __future__ import annotations

from tests.helpers.session_ends import connect, note, number, pair, talk

from ratchet.transport.mailbox.codec import decode_envelope
from ratchet.transport.mailbox.flight import Item
from ratchet.transport.mailbox.frames import BULK, CONTROL
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.session import Session


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
