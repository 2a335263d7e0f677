"""Frames and envelopes as bytes.

Consumes bytes and messages, produces messages and bytes; waits for nothing.

A frame is a 4-byte big-endian length and one msgpack value. Each message is encoded once, with its
envelope. A frame is decoded in one go down to its messages, by a decoder that knows only the types
whose form is bounded. What it refuses is decoded again with the messages left as raw bytes: one
that is free in form is measured (`depth`) before it is decoded, and one that cannot be decoded
spoils itself and not its link.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias, Union, cast, get_args

import msgspec
import msgspec.inspect

from ratchet.errors import ProtocolError
from ratchet.messages import Message, WireMessage
from ratchet.transport.mailbox.blobs import put_in, take_out
from ratchet.transport.mailbox.depth import is_free_form, within_depth
from ratchet.transport.mailbox.frames import (
    BULK,
    BULK_MESSAGES,
    CONTROL,
    Ack,
    Answer,
    Body,
    Bye,
    Data,
    Ended,
    Envelope,
    Failure,
    HelloFrame,
    Laden,
    LinkFrame,
    Part,
    Request,
    Shared,
    Tell,
    Watch,
)
from ratchet.transport.mailbox.shared import Array

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
