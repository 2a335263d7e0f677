"""Frames and envelopes: what the bytes on a link mean, and the limits that hold before they are read.

Consumes bytes and messages, produces messages and bytes; waits for nothing.

A frame is a 4-byte big-endian length and one msgpack value of a closed union: `HelloFrame` before
both ends have proved who they are, `LinkFrame` after. Envelopes ride in frames. A message is
encoded once, as msgpack of `messages.WireMessage`, and rides in its envelope as raw bytes, so that a
message that cannot be decoded spoils itself and not its link.

Two lanes: `CONTROL` and `BULK`. What carries token ids or prompts (`BULK_MESSAGES`) goes on the bulk
lane, and so do answers larger than one fragment; all else is control. Within a lane messages between
two actors stay in order; between lanes a control message may overtake bulk. The lane follows from
the type of a message, never from its size, because order matters more to a command than speed does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias, get_args

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
from ratchet.types import PolicyVersion

PROTOCOL: Final = 1
"""Version of everything in this file; both ends of a link must speak the same."""

CONTROL: Final = 0
BULK: Final = 1
BULK_MESSAGES: Final = frozenset({GroupFinished, GroupFailed, PromptsClaimed, BatchReady})
"""`GroupFailed` is small, but its running totals must not overtake those of a `GroupFinished`."""


@dataclass(frozen=True)
class Limits:
    """Sizes and times of a link. Both ends of a run use the same."""

    hello_bytes: int = 4096
    """largest frame from a peer that has not proved itself"""
    frame_bytes: int = 1 << 20
    fragment_bytes: int = 256 << 10
    """a longer message travels in pieces of this size, and control messages go in between"""
    message_bytes: int = 256 << 20
    """largest message; the sender refuses a larger one, the receiver ends the link"""
    depth: int = 64
    """deepest nesting of a message that is free in form"""
    connections: int = 256
    window_messages: int = 4096
    """pieces that may be unacknowledged, per lane"""
    window_bytes: int = 16 << 20
    queue_messages: int = 1 << 18
    """messages that may wait for a peer, per lane; more become dead letters"""
    queue_bytes: int = 1 << 30
    hello_s: float = 5.0
    heartbeat_s: float = 1.0
    suspect_s: float = 5.0
    """silence after which the log says that the peer's loop does not respond"""
    dead_s: float = 30.0
    """silence, or absence without proof of death, after which the peer counts as dead"""
    delivery_s: float = 30.0
    """a message not on its way to its receiver by then becomes a dead letter"""
    ack_delay_s: float = 0.002
    """how long an acknowledgement waits for a frame that could carry it"""
    dial_first_s: float = 0.02
    dial_most_s: float = 0.5


# --- envelopes: what travels in a session


class Tell(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """A message for an actor."""

    sender: str
    receiver: str
    trace_id: str | None
    version: PolicyVersion | None
    body: msgspec.Raw


class Request(msgspec.Struct, frozen=True, array_like=True, tag="q"):
    """A message for an actor that owes an `Answer` or a `Failure` with the same id."""

    sender: str
    receiver: str
    trace_id: str | None
    version: PolicyVersion | None
    ask_id: int
    timeout_s: float
    body: msgspec.Raw


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """The reply to a `Request`."""

    ask_id: int
    body: msgspec.Raw


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


Envelope: TypeAlias = Tell | Request | Answer | Failure | Watch | Ended


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


def encode_body(message: Message) -> msgspec.Raw:
    """Encode a message; `ProtocolError` if it is not one of the contract or cannot be encoded."""
    if type(message) not in _WIRE_TYPES:
        raise ProtocolError(f"{type(message).__name__} is not a message that may cross a link")
    try:
        return msgspec.Raw(_encoder.encode(message))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"{type(message).__name__} cannot be encoded: {error}") from None


def lane_of(message: Message) -> int:
    """Return the lane of a told or asked message."""
    return BULK if type(message) in BULK_MESSAGES else CONTROL


def encode_envelope(envelope: Envelope) -> bytes:
    """Encode an envelope."""
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


# kind of a msgpack value by its first byte: (bytes to skip, bytes of the length field, items per
# unit of length); fixed containers and strings are told from the byte itself
_SCALAR_BYTES: Final = {
    0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip
_BLOB_LENGTH_BYTES: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_EXT_LENGTH_BYTES: Final = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_CONTAINERS: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def within_depth(data: bytes, limit: int) -> bool:
    """Walk over one msgpack value without building it; tell whether it nests at most `limit` deep.

    A value that is cut short is left to the decoder, which refuses it.
    """
    open_items = [1]
    at = 0
    while open_items:
        if open_items[-1] == 0:
            open_items.pop()
            continue
        if at >= len(data):
            return True
        open_items[-1] -= 1
        at, num_items = _step(data, at)
        if num_items:
            if len(open_items) > limit:
                return False
            open_items.append(num_items)
    return True


def _step(data: bytes, at: int) -> tuple[int, int]:
    """Return where the value at `at` ends, or its first item starts, and how many items follow."""
    first = data[at]
    at += 1
    if first <= 0x7F or first >= 0xE0:
        return at, 0
    if first <= 0x8F:
        return at, 2 * (first & 0x0F)
    if first <= 0x9F:
        return at, first & 0x0F
    if first <= 0xBF:
        return at + (first & 0x1F), 0
    if (width := _BLOB_LENGTH_BYTES.get(first)) is not None:
        return at + width + int.from_bytes(data[at : at + width], "big"), 0
    if (container := _CONTAINERS.get(first)) is not None:
        width, per_unit = container
        return at + width, per_unit * int.from_bytes(data[at : at + width], "big")
    if (width := _EXT_LENGTH_BYTES.get(first)) is not None:
        return at + width + 1 + int.from_bytes(data[at : at + width], "big"), 0
    return at + _SCALAR_BYTES.get(first, 0), 0


# --- bytes to frames


class FrameReader:
    """Cuts a stream of bytes into frames. The buffer grows to the frame announced, once that is
    within the limit, and never beyond it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray(limit + HEADER_BYTES)
        self._start = 0
        self._end = 0

    def widen(self, limit: int, room: int) -> None:
        """Allow larger frames, and read up to `room` bytes at once: the peer has proved itself."""
        self._limit = limit
        self._make_room(room)

    def buffer(self) -> memoryview:
        """Return where the next bytes are to be written."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._buffer):
            self._make_room(0)
        return memoryview(self._buffer)[self._end :]

    def _make_room(self, size: int) -> None:
        held = self._buffer[self._start : self._end]
        if size > len(self._buffer):
            # a new buffer, not a resized one: the event loop may still hold a view of the old
            self._buffer = bytearray(size)
        self._buffer[: len(held)] = held
        self._start, self._end = 0, len(held)

    def written(self, num_bytes: int) -> Iterator[memoryview]:
        """Yield every frame that is complete now that `num_bytes` more bytes are there.

        A view, and what is decoded from it as `Raw`, is good until `buffer` is called again.

        Raises:
            ProtocolError: a frame is longer than the limit.
        """
        self._end += num_bytes
        while self._end - self._start >= HEADER_BYTES:
            body = self._start + HEADER_BYTES
            size = int.from_bytes(self._buffer[self._start : body], "big")
            if size > self._limit:
                raise ProtocolError(f"a frame of {size} bytes; the limit is {self._limit}")
            if self._end - body < size:
                if body + size > len(self._buffer):
                    self._make_room(HEADER_BYTES + size)
                return
            self._start = body + size
            yield memoryview(self._buffer)[body : body + size]
