"""A session whose arrays are copied into shared memory on a thread; here the test is the thread."""

from __future__ import annotations

import os
from concurrent.futures import Future

import pytest
from tests.helpers.groups import finished
from tests.helpers.session_ends import MUCH, RUNS, End, large, sharing, take_all

from ratchet.transport.mailbox.codec import decode_body
from ratchet.transport.mailbox.frames import BULK, CONTROL, Tell
from ratchet.transport.mailbox.shared import SHARED_BYTES, Loan


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
