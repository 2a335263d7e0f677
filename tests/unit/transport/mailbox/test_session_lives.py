"""A session between lives: what a life that ends gives back, and what the next one gets."""

from __future__ import annotations

import pytest
from tests.helpers.session_ends import End, connect, number, pair, talk

from ratchet.errors import ProtocolError
from ratchet.transport.mailbox.codec import decode_envelope
from ratchet.transport.mailbox.frames import BULK, CONTROL


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
