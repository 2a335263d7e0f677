"""Frames and envelopes: what the bytes on a link mean.

Consumes bytes and messages, produces messages and bytes; waits for nothing.

A frame is a 4-byte big-endian length and one msgpack value of a closed union: `HelloFrame` before
both ends have proved who they are, `LinkFrame` after. Envelopes ride in frames, messages in
envelopes, each encoded once. A frame is decoded in one go down to its messages, by a decoder that
knows only the types whose form is bounded. What it refuses is decoded again with the messages left
as raw bytes: one that is free in form is measured (`depth`) before it is decoded, and one that
cannot be decoded spoils itself and not its link.

Two lanes: `CONTROL` and `BULK`. What carries token ids or prompts (`BULK_MESSAGES`) goes on the
bulk lane, and so do answers larger than one fragment; all else is control. Within a lane messages
between two actors stay in order; between lanes a control message may overtake bulk. The lane
follows from the type of a message, not from its size, because order matters more to a command than
speed does; only an answer, which follows on nothing but its question, is sorted by size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Generic, TypeAlias, TypeVar, Union, cast, get_args

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
from ratchet.transport.mailbox.blobs import put_in, take_out
from ratchet.transport.mailbox.depth import is_free_form, within_depth
from ratchet.transport.mailbox.shared import Array, FileName, Place
from ratchet.types import PolicyVersion

PROTOCOL: Final = 3
"""Version of everything in this file; both ends of a link must speak the same."""

CONTROL: Final = 0
BULK: Final = 1
BULK_MESSAGES: Final = frozenset({GroupFinished, GroupFailed, PromptsClaimed, BatchReady})
"""`GroupFailed` is small, but its running totals must not overtake those of a `GroupFinished`."""


B = TypeVar("B")

# --- envelopes: what travels in a session. B is a message, or its raw bytes where it could not be
# decoded with its frame


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


Body: TypeAlias = Message | msgspec.Raw
Envelope: TypeAlias = Tell[Body] | Request[Body] | Answer[Body] | Failure | Watch | Ended


class Laden(msgspec.Struct, Generic[B], frozen=True, array_like=True, tag="l"):
    """An envelope whose message has left its large arrays behind: they follow, one by one, in the
    pieces after it. `slots` are their places among all arrays of the message.
    """

    slots: tuple[int, ...]
    envelope: B


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
    probe: FileName | None = None
    """for the peer to try whether it can read files of this process"""


class Proof(msgspec.Struct, frozen=True, array_like=True, tag="proof"):
    """The sender holds the key; the dialler's first. `life` names its end of the session."""

    mac: bytes
    life: str
    delivered: tuple[int, int]
    """pieces received in order, per lane, of the life in the peer's proof; the dialler's: unused"""
    reads: bool = False
    """the sender can read files of the peer; the dialler's: unused"""


class Resume(msgspec.Struct, frozen=True, array_like=True, tag="resume"):
    """The dialler would go on from here."""

    delivered: tuple[int, int]
    reads: bool = False


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Last word of the listener: the link is open. Before it the dialler has sent nothing."""


class Reject(msgspec.Struct, frozen=True, array_like=True, tag="reject"):
    """The link will not be opened, and why."""

    kind: str
    text: str


HelloFrame: TypeAlias = Hello | Proof | Resume | Welcome | Reject


# --- frames of an open link; each carries the cumulative acks of both lanes


class Data(msgspec.Struct, Generic[B], frozen=True, array_like=True, tag="d"):
    """Whole envelopes with the consecutive numbers `seq`, `seq + 1` ..."""

    acks: tuple[int, int]
    lane: int
    seq: int
    items: list[Tell[B] | Request[B] | Answer[B] | Failure | Watch | Ended]


class Part(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """A piece of one envelope, or of an array that it has left behind; `more` pieces follow, or it
    is the last one.
    """

    acks: tuple[int, int]
    lane: int
    seq: int
    more: bool
    data: memoryview
    """of the reader's buffer: to be copied before that is used again"""
    cut: bool = False
    """the envelope or array ends here, and the next piece begins another array"""


class Shared(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """All `count` pieces of one envelope, which has left its arrays behind: they lie in files of
    the sender, which stay until this is acknowledged.
    """

    acks: tuple[int, int]
    lane: int
    seq: int
    count: int
    body: memoryview
    """empty if it is long: then it lies in the first place"""
    files: list[FileName]
    places: list[Place]

    @property
    def num_bytes(self) -> int:
        """Size of the whole."""
        return len(self.body) + sum(place.num_bytes for place in self.places)


class Ack(msgspec.Struct, frozen=True, array_like=True, tag="k"):
    """Acks alone: when there is nothing to carry them, and as a heartbeat."""

    acks: tuple[int, int]


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """The sender stops; it has sent all it will."""

    reason: str


LinkFrame: TypeAlias = Data[Body] | Part | Shared | Ack | Bye


_WIRE_TYPES: Final = frozenset(get_args(WireMessage))
_BOUNDED: Any = Union[  # noqa: UP007 - of a computed tuple
    tuple(kind for kind in _WIRE_TYPES if not is_free_form(msgspec.inspect.type_info(kind)))
]
_RawEnvelope: TypeAlias = (
    Tell[msgspec.Raw] | Request[msgspec.Raw] | Answer[msgspec.Raw] | Failure | Watch | Ended
)
_encoder = msgspec.msgpack.Encoder()
_hello_decoder = msgspec.msgpack.Decoder(HelloFrame)
_link_decoder: msgspec.msgpack.Decoder[LinkFrame] = msgspec.msgpack.Decoder(
    Data[_BOUNDED] | Part | Shared | Ack | Bye
)
_raw_link_decoder: msgspec.msgpack.Decoder[LinkFrame] = msgspec.msgpack.Decoder(
    cast("Any", Data[msgspec.Raw] | Part | Shared | Ack | Bye)
)
_raw_envelope_decoder: msgspec.msgpack.Decoder[Envelope] = msgspec.msgpack.Decoder(
    cast("Any", _RawEnvelope)
)
_laden_decoder: msgspec.msgpack.Decoder[Laden[Tell[Message] | Request[Message]]] = (
    msgspec.msgpack.Decoder(Laden[Tell[_BOUNDED] | Request[_BOUNDED]])
)
_bounded_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(_BOUNDED)
_body_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(WireMessage)

HEADER_BYTES: Final = 4
_SHORT_LISTS: Final = tuple(bytes((0x90 | count,)) for count in range(16))
_REFUSED = (msgspec.MsgspecError, RecursionError, UnicodeError)


def pack(frame: HelloFrame | LinkFrame) -> bytearray:
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


def pack_data(acks: tuple[int, int], lane: int, seq: int, envelopes: Sequence[bytes]) -> bytes:
    """Return a `Data` of envelopes that are encoded already, with its length in front."""
    count = len(envelopes)
    head = _encoder.encode(Data(acks, lane, seq, []))[:-1]  # less its empty list
    head += _SHORT_LISTS[count] if count < 16 else b"\xdd" + count.to_bytes(4, "big")
    size = len(head) + sum(map(len, envelopes))
    return b"".join((size.to_bytes(HEADER_BYTES, "big"), head, *envelopes))


def unpack_link(data: bytes | memoryview) -> LinkFrame:
    """Decode a frame of an open link; `ProtocolError` if it is none."""
    try:
        return _link_decoder.decode(data)
    except _REFUSED:
        pass
    try:
        return _raw_link_decoder.decode(data)
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


def encode_parcel(envelope: Tell[Any] | Request[Any]) -> tuple[bytes, tuple[Array, ...]]:
    """Encode an envelope, less the large arrays of its message, and return those too.

    Raises:
        ProtocolError: the message is not one of the contract, or cannot be encoded.
    """
    try:
        light, slots, arrays = take_out(envelope.body)
    except (TypeError, AttributeError):
        arrays = ()  # what is wrong with the message is for the encoder to say
    if not arrays:
        return encode_envelope(envelope), ()
    encoded = encode_envelope(msgspec.structs.replace(envelope, body=light))
    return _encoder.encode(Laden(slots, msgspec.Raw(encoded))), arrays


def encode_note(envelope: Failure | Watch | Ended) -> bytes:
    """Encode an envelope that holds no message."""
    return _encoder.encode(envelope)


def decode_envelope(data: bytes | memoryview, arrays: Sequence[Array] = ()) -> Envelope:
    """Decode an envelope, with the arrays that its message has left behind.

    Raises:
        ProtocolError: it is none, or the arrays are not those of the message.
    """
    try:
        if arrays:
            return _decode_laden(data, arrays)
        return _raw_envelope_decoder.decode(data)
    except (*_REFUSED, ValueError) as error:
        raise ProtocolError(f"not an envelope: {error}") from None


def _decode_laden(data: bytes | memoryview, arrays: Sequence[Array]) -> Envelope:
    laden = _laden_decoder.decode(data)
    put_in(laden.envelope.body, laden.slots, arrays)
    return cast("Envelope", laden.envelope)


def decode_body(body: Body | bytes, depth: int) -> Message:
    """Decode a message, if that has not happened with its frame.

    Raises:
        ProtocolError: it is none of the contract, or nests more than `depth` deep.
    """
    if isinstance(body, Message):
        return body
    try:
        return _bounded_decoder.decode(body)
    except _REFUSED:
        if not within_depth(bytes(body), depth):
            raise ProtocolError(f"a message is nested more than {depth} deep") from None
    try:
        return _body_decoder.decode(body)
    except _REFUSED as error:
        raise ProtocolError(f"not a message: {error}") from None
