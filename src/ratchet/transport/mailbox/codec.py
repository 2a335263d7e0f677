"""Frames and envelopes: what the bytes on a link mean.

Consumes bytes and messages, produces messages and bytes; waits for nothing.

A frame is a 4-byte big-endian length and one msgpack value of a closed union: `HelloFrame` before
both ends have proved who they are, `LinkFrame` after. Envelopes ride in frames. A message is
encoded once, as msgpack of `messages.WireMessage`, and rides in its envelope as raw bytes, so that
a message that cannot be decoded spoils itself and not its link.

Two lanes: `CONTROL` and `BULK`. What carries token ids or prompts (`BULK_MESSAGES`) goes on the
bulk lane, and so do answers larger than one fragment; all else is control. Within a lane messages
between two actors stay in order; between lanes a control message may overtake bulk. The lane
follows from the type of a message, not from its size, because order matters more to a command than
speed does; only an answer, which follows on nothing but its question, is sorted by size.
"""

from __future__ import annotations

from typing import Any, Final, Generic, TypeAlias, TypeVar, get_args

import msgspec
import msgspec.inspect

from ratchet.errors import ProtocolError
from ratchet.messages import (
    BatchReady,
    GroupFailed,
    GroupFinished,
    Message,
    PromptsClaimed,
    WireMessage,
)
from ratchet.transport.mailbox.depth import within_depth
from ratchet.types import PolicyVersion

PROTOCOL: Final = 1
"""Version of everything in this file; both ends of a link must speak the same."""

CONTROL: Final = 0
BULK: Final = 1
BULK_MESSAGES: Final = frozenset({GroupFinished, GroupFailed, PromptsClaimed, BatchReady})
"""`GroupFailed` is small, but its running totals must not overtake those of a `GroupFinished`."""


B = TypeVar("B")

# --- envelopes: what travels in a session. B is a message where one is written, and raw bytes where
# one is read


class Tell(msgspec.Struct, Generic[B], frozen=True, array_like=True, tag="t"):
    """A message for an actor."""

    sender: str
    receiver: str
    trace_id: str | None
    version: PolicyVersion | None
    body: B


class Request(msgspec.Struct, Generic[B], frozen=True, array_like=True, tag="q"):
    """A message for an actor that owes an `Answer` or a `Failure` with the same id."""

    sender: str
    receiver: str
    trace_id: str | None
    version: PolicyVersion | None
    ask_id: int
    timeout_s: float
    body: B


class Answer(msgspec.Struct, Generic[B], frozen=True, array_like=True, tag="a"):
    """The reply to a `Request`."""

    ask_id: int
    body: B


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """The error that ended a `Request`: a pair of `errors.to_wire`."""

    ask_id: int
    kind: str
    text: str


class Watch(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """Asks for an `Ended` with the same id when the actor ends."""

    watch_id: int
    receiver: str


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """A watched actor has ended."""

    watch_id: int
    reason: str


Envelope: TypeAlias = (
    Tell[msgspec.Raw] | Request[msgspec.Raw] | Answer[msgspec.Raw] | Failure | Watch | Ended
)


# --- frames before the link is authenticated


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First frame of both ends, the dialler's first."""

    protocol: int
    name: str
    wanted: str
    """the name the dialler wants to reach; the listener's: the name it heard"""
    incarnation: str
    run_id: str
    nonce: bytes


class Proof(msgspec.Struct, frozen=True, array_like=True, tag="proof"):
    """The sender holds the key; the dialler's first. `life` names its end of the session."""

    mac: bytes
    life: str
    delivered: tuple[int, int]
    """pieces received in order, per lane, of the life in the peer's proof; the dialler's: unused"""


class Resume(msgspec.Struct, frozen=True, array_like=True, tag="resume"):
    """Last word of the dialler: the link is open."""

    delivered: tuple[int, int]


class Reject(msgspec.Struct, frozen=True, array_like=True, tag="reject"):
    """The link will not be opened, and why."""

    kind: str
    text: str


HelloFrame: TypeAlias = Hello | Proof | Resume | Reject


# --- frames of an open link; each carries the cumulative acks of both lanes


class Data(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """Whole envelopes with the consecutive numbers `seq`, `seq + 1` ..."""

    acks: tuple[int, int]
    lane: int
    seq: int
    items: list[Envelope]


class Part(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """A piece of one envelope; `more` pieces follow, or it is the last one."""

    acks: tuple[int, int]
    lane: int
    seq: int
    more: bool
    data: bytes


class Ack(msgspec.Struct, frozen=True, array_like=True, tag="k"):
    """Acks alone: when there is nothing to carry them, and as a heartbeat."""

    acks: tuple[int, int]


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """The sender stops; it has sent all it will."""

    reason: str


LinkFrame: TypeAlias = Data | Part | Ack | Bye


class RawData(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """`Data` as it is written: the envelopes are already encoded."""

    acks: tuple[int, int]
    lane: int
    seq: int
    items: list[msgspec.Raw]


_encoder = msgspec.msgpack.Encoder()
_hello_decoder = msgspec.msgpack.Decoder(HelloFrame)
_link_decoder = msgspec.msgpack.Decoder(LinkFrame)
_envelope_decoder: msgspec.msgpack.Decoder[Envelope] = msgspec.msgpack.Decoder(Envelope)
_body_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(WireMessage)

HEADER_BYTES: Final = 4
_REFUSED = (msgspec.MsgspecError, RecursionError, UnicodeError)


def pack(frame: HelloFrame | LinkFrame | RawData) -> bytearray:
    """Return the frame with its length in front."""
    buffer = bytearray(HEADER_BYTES)
    _encoder.encode_into(frame, buffer, HEADER_BYTES)
    buffer[:HEADER_BYTES] = (len(buffer) - HEADER_BYTES).to_bytes(HEADER_BYTES, "big")
    return buffer


def unpack_hello(data: bytes | memoryview) -> HelloFrame:
    """Decode a frame of a link that is not open yet; `ProtocolError` if it is none."""
    try:
        return _hello_decoder.decode(data)
    except _REFUSED as error:
        raise ProtocolError(f"not a frame of a hello: {error}") from None


def unpack_link(data: bytes | memoryview) -> LinkFrame:
    """Decode a frame of an open link; `ProtocolError` if it is none."""
    try:
        return _link_decoder.decode(data)
    except _REFUSED as error:
        raise ProtocolError(f"not a frame of a link: {error}") from None


def lane_of(message: Message) -> int:
    """Return the lane of a told or asked message."""
    return BULK if type(message) in BULK_MESSAGES else CONTROL


def encode_envelope(envelope: Tell[Any] | Request[Any] | Answer[Any]) -> bytes:
    """Encode an envelope and the message in it.

    Raises:
        ProtocolError: the message is not one of the contract, or cannot be encoded.
    """
    kind = type(envelope.body)
    if kind not in _WIRE_TYPES:
        raise ProtocolError(f"{kind.__name__} is not a message that may cross a link")
    try:
        return _encoder.encode(envelope)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"{kind.__name__} cannot be encoded: {error}") from None


def encode_note(envelope: Failure | Watch | Ended) -> bytes:
    """Encode an envelope that holds no message."""
    return _encoder.encode(envelope)


def decode_envelope(data: bytes | bytearray) -> Envelope:
    """Decode an envelope; `ProtocolError` if it is none."""
    try:
        return _envelope_decoder.decode(data)
    except _REFUSED as error:
        raise ProtocolError(f"not an envelope: {error}") from None


def decode_body(body: msgspec.Raw | bytes, depth: int) -> Message:
    """Decode a message; `ProtocolError` if it is none of the contract or nests too deep."""
    if not _is_bounded(bytes(memoryview(body)[:_HEAD_BYTES])) and not within_depth(
        bytes(body), depth
    ):
        raise ProtocolError(f"a message is nested more than {depth} deep")
    try:
        return _body_decoder.decode(body)
    except _REFUSED as error:
        raise ProtocolError(f"not a message: {error}") from None


# --- nesting


def _holds_any(kind: msgspec.inspect.Type) -> bool:
    """Tell whether a type leaves the form of a value open somewhere."""
    if isinstance(kind, msgspec.inspect.AnyType):
        return True
    inner: list[msgspec.inspect.Type] = []
    if isinstance(kind, msgspec.inspect.StructType):
        inner = [field.type for field in kind.fields]
    elif isinstance(kind, msgspec.inspect.UnionType):
        inner = list(kind.types)
    elif isinstance(kind, msgspec.inspect.DictType):
        inner = [kind.key_type, kind.value_type]
    elif isinstance(kind, msgspec.inspect.TupleType):
        inner = list(kind.item_types)
    elif isinstance(kind, msgspec.inspect.CollectionType):
        inner = [kind.item_type]
    return any(_holds_any(each) for each in inner)


_WIRE_TYPES: Final = frozenset(get_args(WireMessage))
_BOUNDED_TAGS: Final = frozenset(
    each.__name__.encode()
    for each in _WIRE_TYPES
    if not _holds_any(msgspec.inspect.type_info(each))
)
_TYPE_KEY: Final = b"\xa4type"
_HEAD_BYTES: Final = 40  # a map's header, the key "type" and a tag of up to 31 bytes


def _is_bounded(head: bytes) -> bool:
    """Tell whether the type of a message bounds its nesting, so that a walk over it is not needed.

    Reads the tag where our encoder puts it: as the first pair of the map. A tag elsewhere costs a
    walk, no more.
    """
    if not head.startswith(_TYPE_KEY, 1) or len(head) <= 6:
        return False
    return head[7 : 7 + (head[6] & 0x1F)] in _BOUNDED_TAGS
