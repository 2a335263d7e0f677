"""A slice of the fuzzing that `python -m tests.fuzz` does at length, and proof that it can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.fuzz import campaign, sockets

from ratchet.errors import ProtocolError
from ratchet.transport.mailbox import connection, dispatch
from ratchet.transport.mailbox.connection import Connection
from ratchet.transport.mailbox.node import Node

FEW = 3000


def test_twenty_thousand_frames_break_nothing() -> None:
    outcome = campaign.run(18_000, seed=0)
    assert not outcome.problems
    assert outcome.frames >= 18_000
    assert outcome.delivered > 2000
    for what in (
        "delivered",
        "protocol error in the hello",
        "protocol error on an open link",
        "refused in the hello",
        "waits for the rest",
    ):
        assert outcome.counts[what] > 100, what
    warm, after, _ = outcome.rss_mib
    assert after - warm < 64


def test_two_thousand_frames_on_sockets_break_nothing() -> None:
    outcome = sockets.run(2000, seed=0)
    assert not outcome.problems
    assert outcome.delivered > 50
    assert outcome.counts["link_broken"] > 5
    assert outcome.counts["hello_failed"] > 5


decode_body = dispatch.decode_body
unpack_link = connection.unpack_link


def lenient(body: Any, depth: int) -> Any:
    """Hands on what is no message, as it is."""
    try:
        return decode_body(body, depth)
    except ProtocolError:
        return msgspec.msgpack.decode(body)


def executing(body: Any, depth: int) -> Any:
    """Evaluates something, as careless decoders do."""
    compile("1", "frame", "eval")
    return decode_body(body, depth)


def leaking(data: Any) -> Any:
    """Lets an error out that nobody above expects."""
    try:
        return unpack_link(data)
    except ProtocolError as error:
        raise ValueError(str(error)) from None


def forgetful(self: Node, closed: Connection) -> None:
    """Keeps every connection."""
    del self, closed


PLANTED: list[tuple[Any, str, Callable[..., Any], str]] = [
    (dispatch, "decode_body", lenient, "delivered what is no message"),
    (dispatch, "decode_body", executing, "executed: compile"),
    (connection, "unpack_link", leaking, "ValueError: not a frame"),
    (Node, "on_closed", forgetful, "a connection stays"),
]


@pytest.mark.parametrize(("where", "name", "fault", "found"), PLANTED)
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, fault: Callable[..., Any], found: str
) -> None:
    monkeypatch.setattr(where, name, fault)
    outcome = campaign.run(FEW, seed=0)
    assert any(found in problem for problem in outcome.problems), outcome.problems[:3]
