from __future__ import annotations

from tests.helpers.actors import make_system

from ratchet.status import DeadLetterRow


def test_dead_letters_are_counted_by_receiver_type_and_reason() -> None:
    box = make_system().dead_letters
    for receiver, message, reason in [("a", 1, "x"), ("a", 2, "x"), ("a", "s", "x"), ("b", 1, "y")]:
        box.record(sender="me", receiver=receiver, message=message, reason=reason)
    assert box.counts == {("a", "int", "x"): 2, ("a", "str", "x"): 1, ("b", "int", "y"): 1}
    assert box.total == 4


def test_dead_letters_name_their_senders_the_most_frequent_first() -> None:
    box = make_system().dead_letters
    for sender in ("a", "b", None, "b"):
        box.record(sender=sender, receiver="x", message=1, reason="r")
    rows = box.most_frequent(2)
    assert rows == (
        DeadLetterRow("b", "x", "int", "r", 2),
        DeadLetterRow("a", "x", "int", "r", 1),
    )
    assert box.counts == {("x", "int", "r"): 4}


def test_dead_letters_of_ever_new_reasons_take_a_bounded_place_and_are_all_counted() -> None:
    box = make_system().dead_letters
    for n in range(5000):
        box.record(sender="a", receiver="x", message=n, reason=f"reason {n}")
    assert box.total == 5000
    assert len(box.most_frequent(10_000)) == 1025
    assert box.most_frequent(1) == (DeadLetterRow(None, "(others)", "int", "(others)", 3976),)
