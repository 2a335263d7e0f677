"""Which of several processes with one name counts."""

from __future__ import annotations

from ratchet.transport.mailbox.lives import Lives


def lives(words: dict[str, bool] | None = None) -> Lives:
    """Those of a name of which the registry has said this much."""
    return Lives((words or {}).get)


def test_the_last_that_came_is_present_and_keeps_the_one_before_out() -> None:
    here = lives()
    assert here.admits("a")
    assert not here.come("a", 1.0)
    assert not here.has_replaced
    assert here.come("b", 2.0)
    assert here.present == "b"
    assert (here.admits("a"), here.admits("b"), here.has_replaced) == (False, True, True)


def test_the_same_life_may_come_again_and_replaces_nobody() -> None:
    here = lives()
    here.come("a", 1.0)
    assert not here.come("a", 3.0)
    assert here.came_at == 1.0
    assert here.admits("a")


def test_the_word_of_the_registry_goes_before_the_order_here() -> None:
    here = lives({"a": True, "b": False})
    here.come("a", 1.0)
    here.come("b", 2.0)
    assert (here.admits("a"), here.admits("b")) == (True, False)
    assert not here.comes_late("a", 0.0)


def test_one_that_the_registry_brings_back_does_not_keep_the_other_out() -> None:
    here = lives({"a": True})
    here.come("b", 1.0)
    assert here.come("a", 2.0)
    assert here.admits("b")


def test_a_life_whose_connection_was_made_before_that_of_the_present_one_comes_late() -> None:
    here = lives()
    assert not here.comes_late("a", 1.0)  # nobody is here
    here.come("b", 2.0)
    assert not here.comes_late("b", 1.0)
    assert not here.comes_late("c", 2.5)
    assert here.comes_late("a", 1.5)
    assert not here.admits("a")
    assert here.present == "b"


def test_one_that_was_here_comes_back_until_a_life_of_ours_begins_anew() -> None:
    here = lives()
    here.come("a", 1.0)
    here.had_session("a")
    here.come("b", 2.0)
    assert here.comes_back("a")
    assert here.admits("a")
    assert here.comes_back("a")
    here.begin_anew()
    assert not here.comes_back("a")
