from __future__ import annotations

import pytest

from ratchet.errors import (
    ConfigError,
    HandlerFailed,
    StaleTerm,
    UserError,
    from_wire,
    to_wire,
)


def test_errors_of_the_table_keep_their_type() -> None:
    again = from_wire(*to_wire(StaleTerm("term 1 is fenced by term 2")))
    assert type(again) is StaleTerm
    assert str(again) == "term 1 is fenced by term 2"


@pytest.mark.parametrize("error", [KeyError("x"), ConfigError("a local matter")])
def test_other_errors_say_what_they_were(error: Exception) -> None:
    kind, text = to_wire(error)
    assert kind == "HandlerFailed"
    assert type(error).__name__ in text


def test_a_peer_cannot_name_a_class_of_its_own() -> None:
    assert type(from_wire("SystemExit", "0")) is HandlerFailed


def test_a_users_mistakes_are_told_from_ours() -> None:
    assert issubclass(ConfigError, UserError)
    assert not issubclass(StaleTerm, UserError)
