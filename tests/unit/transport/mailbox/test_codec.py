from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from tests.helpers.nodes import feed

from ratchet.errors import ProtocolError
from ratchet.messages import (
    AbortLoad,
    ClaimPrompts,
    Down,
    GroupFailed,
    LoadWeights,
    Message,
    PromptsClaimed,
)
from ratchet.transport.mailbox.codec import (
    decode_body,
    decode_envelope,
    encode_envelope,
    encode_note,
    lane_of,
    pack,
    unpack_hello,
    unpack_link,
)
from ratchet.transport.mailbox.frames import BULK, CONTROL, Ack, Bye, Data, Failure, Part, Tell
from ratchet.transport.mailbox.reader import FrameReader
from ratchet.types import Assignment, Prompt, RolloutStats


def assigned(metadata: dict[str, Any]) -> PromptsClaimed:
    prompt = Prompt("p", "text", metadata=metadata)
    return PromptsClaimed("i", (Assignment(1, 0, 0, prompt, 8, 60.0),))


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"m": value}
    return value


def through(message: Message, depth: int = 64) -> Message:
    envelope = decode_envelope(encode_envelope(Tell("a", "b", "t", 3, message)))
    assert isinstance(envelope, Tell)
    assert (envelope.sender, envelope.receiver) == ("a", "b")
    assert (envelope.trace_id, envelope.version) == ("t", 3)
    return decode_body(envelope.body, depth)


@pytest.mark.parametrize(
    "message",
    [Down("a", "why"), AbortLoad(1, 2, "r"), assigned({"a": [1, {"b": None}]})],
)
def test_a_message_survives_its_envelope(message: Message) -> None:
    assert through(message) == message


def test_lanes_follow_from_types() -> None:
    stats = RolloutStats("w", "i")
    assert lane_of(assigned({})) == BULK
    assert lane_of(GroupFailed("w", "i", 1, 0, "abort", "", stats)) == BULK
    for control in (Down("a", "b"), AbortLoad(1, 2, "r"), ClaimPrompts("w", "i", 1)):
        assert lane_of(control) == CONTROL
    assert LoadWeights not in {PromptsClaimed}


def test_what_is_not_of_the_contract_is_not_encoded() -> None:
    class Other(Message, frozen=True):
        pass

    with pytest.raises(ProtocolError, match="Other is not a message"):
        encode_envelope(Tell("a", "b", None, None, Other()))


@pytest.mark.parametrize("value", [object(), 2**64, {1, object()}])
def test_what_msgpack_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(ProtocolError, match="PromptsClaimed cannot be encoded"):
        encode_envelope(Tell("a", "b", None, None, assigned({"x": value})))


def test_what_holds_itself_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["me"] = loop
    with pytest.raises(ProtocolError, match="cannot be encoded"):
        encode_envelope(Tell("a", "b", None, None, assigned(loop)))


def test_nesting_is_refused_before_it_is_decoded() -> None:
    shallow = assigned(nested(10))
    assert through(shallow, depth=20) == shallow
    with pytest.raises(ProtocolError, match="more than 64 deep"):
        through(assigned(nested(70)))


def test_nesting_cannot_hide_behind_a_tag_in_another_place() -> None:
    deep = b"\x91" * 100 + b"\x01"
    for body in (
        b"\x82\xa1x" + deep + b"\xa4type\xa4Down",
        b"\x82\xa4kind\xa4Down\xa4type" + deep,
        b"\xde\x00\x01\xa4type" + deep,
        b"\xa4type",
        b"",
    ):
        with pytest.raises(ProtocolError):
            decode_body(body, 64)


@pytest.mark.parametrize(
    "body",
    [
        b"\x81\xa4type\xa7NoSuch!",
        b"\x81\xa4type\xa4Down",
        b"\x83\xa4type\xa4Down\xa4name\xa2\xff\xfe\xa6reason\xa1a",
        b"\x82\xa4type\xa4Down\xa4name" + b"\x91" * 5000,
        b"\x84\xa4type\xa4Down\xa4name\xa1a\xa6reason\xa1b\xa1z" + b"\x91" * 5000 + b"\x01",
        b"\xc1",
    ],
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_body(body, 64)


def test_frames_survive_the_wire() -> None:
    frames = [
        Data((1, 2), CONTROL, 3, [Failure(1, "k", "t")]),
        Part((1, 2), BULK, 3, True, b"data"),
        Ack((0, 0)),
        Bye("why"),
    ]
    stream = b"".join(bytes(pack(frame)) for frame in frames)
    assert [unpack_link(frame) for frame in feed(FrameReader(4096), stream)] == frames


def test_an_open_links_frames_mean_nothing_in_a_hello() -> None:
    (frame,) = feed(FrameReader(4096), pack(Ack((0, 0))))
    with pytest.raises(ProtocolError):
        unpack_hello(frame)


def test_mutated_frames_are_read_or_refused() -> None:
    """Whatever the bytes, `ProtocolError` is all that comes out besides a frame."""
    rng = random.Random(1)
    body = msgspec.msgpack.encode(assigned({"a": [1, 2, {"b": b"x" * 40}]}))
    envelope = encode_envelope(Tell("a", "b", "t", 3, assigned({"a": [1, {"b": 2.5}]})))
    data = bytes(pack(Part((1, 2), BULK, 3, True, envelope)))[4:]
    whole = Data((1, 2), CONTROL, 3, [Failure(1, "k", "t")] * 3)
    frame = bytes(pack(whole))[4:]
    refused = 0
    for _ in range(4000):
        for original, read in (
            (body, lambda raw: decode_body(raw, 16)),
            (envelope, decode_envelope),
            (data, unpack_link),
            (frame, unpack_link),
            (frame, unpack_hello),
        ):
            mutated = bytearray(original)
            for _ in range(rng.randrange(1, 5)):
                mutated[rng.randrange(len(mutated))] = rng.randrange(256)
            try:
                read(bytes(mutated[: rng.randrange(1, len(mutated) + 1)]))
            except ProtocolError:
                refused += 1
    assert refused > 15_000


def test_an_envelope_without_a_message_is_small() -> None:
    assert len(encode_note(Failure(1, "ActorDead", ""))) < 20
