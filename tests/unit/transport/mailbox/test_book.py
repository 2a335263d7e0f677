from __future__ import annotations

import pytest

from ratchet.errors import ConfigError
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.book import AddressBook

HERE, THERE = Address("tcp", "10.0.0.1", 1), Address("tcp", "10.0.0.1", 2)


def test_the_newest_address_counts() -> None:
    book = AddressBook({"registry": HERE})
    assert book.locate("registry") == HERE
    book.learn("registry", str(THERE))
    assert book.locate("registry") == THERE


def test_who_has_not_told_is_not_known_yet() -> None:
    with pytest.raises(LookupError, match="nobody has told yet where buffer listens"):
        AddressBook().locate("buffer")


def test_no_address_says_nothing_new() -> None:
    book = AddressBook()
    book.learn("visitor", "")
    with pytest.raises(LookupError):
        book.locate("visitor")
    book.learn("buffer", str(HERE))
    book.learn("buffer", "")
    assert book.locate("buffer") == HERE


def test_what_is_no_address_is_refused_and_changes_nothing() -> None:
    book = AddressBook({"buffer": HERE})
    with pytest.raises(ConfigError, match="every interface"):
        book.learn("buffer", "tcp:0.0.0.0:1")
    assert book.locate("buffer") == HERE


def test_the_last_life_that_was_told_of_is_the_newest() -> None:
    book = AddressBook()
    assert book.is_newest("b", "b/1") is None
    book.learn("b", str(HERE), "b/1")
    book.learn("b", str(HERE), "b/2")
    assert [book.is_newest("b", f"b/{n}") for n in (1, 2, 3)] == [False, True, None]
    book.learn("b", str(HERE), "b/1")
    assert [book.is_newest("b", f"b/{n}") for n in (1, 2)] == [True, False]
    for n in range(100):
        book.learn("b", "", f"b/{n}")
    assert book.is_newest("b", "b/1") is None
    assert book.is_newest("b", "b/98") is False
