from __future__ import annotations

import typing

import msgspec
import pytest

from ratchet import messages
from ratchet.messages import Message, WireMessage
from ratchet.types import RoleInfo


def concrete() -> list[type[Message]]:
    found = [v for v in vars(messages).values() if isinstance(v, type) and issubclass(v, Message)]
    return [cls for cls in found if cls not in (Message, messages.Ask)]


def test_every_message_of_the_page_may_cross_a_link() -> None:
    assert set(typing.get_args(WireMessage)) == set(concrete())


def test_every_ask_has_a_reply_that_may_cross_a_link() -> None:
    asks = [cls for cls in concrete() if issubclass(cls, messages.Ask)]
    assert len(asks) == 9
    for ask in asks:
        bases = [b for b in ask.__orig_bases__ if typing.get_origin(b) is messages.Ask]  # type: ignore[attr-defined]
        (reply,) = typing.get_args(bases[0])
        assert reply in typing.get_args(messages.Reply)


def test_a_tag_outside_the_page_is_refused() -> None:
    data = msgspec.msgpack.encode({"type": "SystemExit", "code": 0})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(data, type=WireMessage)


def test_a_message_is_the_same_on_the_other_side() -> None:
    message = messages.RegisterRole(RoleInfo("rollout", "rollout-0", "a"))
    data = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(data, type=WireMessage) == message
