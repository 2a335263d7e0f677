"""Frames for the mailbox fuzzer: valid ones of every kind, and many ways to spoil them.

Consumes a `random.Random`, produces bytes; the same seed gives the same bytes.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import msgspec.inspect as mi

from ratchet.messages import GroupFinished, Message, WireMessage
from ratchet.transport.mailbox.blobs import LEAST_BYTES
from ratchet.transport.mailbox.codec import HEADER_BYTES, encode_envelope, encode_note, pack
from ratchet.transport.mailbox.frames import (
    PROTOCOL,
    Ack,
    Answer,
    Bye,
    Data,
    Ended,
    Failure,
    Hello,
    HelloFrame,
    Laden,
    Part,
    Proof,
    Reject,
    Request,
    Resume,
    Shared,
    Tell,
    Watch,
    Welcome,
)
from ratchet.transport.mailbox.shared import FileName, Place

MESSAGES: tuple[type[Message], ...] = get_args(WireMessage)
INTS = (0, 1, -1, 127, 128, 255, 2**31, -(2**31), 2**53, 2**63 - 1, -(2**63), 2**64 - 1)
FLOATS = (0.0, -1.0, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), 5e-324)
TEXTS = ("", "a", "victim", "..", "%s%n", "\x00", "\n{}", "💥" * 9, "__class__", "x" * 300)
ODD: tuple[Any, ...] = (
    *INTS,
    *FLOATS,
    *TEXTS,
    None,
    True,
    b"",
    b"\xff" * 40,
    [],
    {},
    [[[[]]]],
    {"type": "os.system"},
    {"__reduce__": ["os.system", ["true"]]},
    {1: {2: {3: 4}}},
    msgspec.msgpack.Ext(5, b"x"),
)
MARKERS = bytes((0xC0, 0xC1, 0xC4, 0xC6, 0xC7, 0xC9, 0xCB, 0xCF, 0xD3, 0xD6, 0xDB, 0xDD, 0xDF))
"""First bytes of msgpack values that bring a length, or that no value has."""


# --- valid frames


@functools.cache
def _fields(kind: type) -> tuple[tuple[str, mi.Type], ...]:
    info = mi.type_info(kind)
    assert isinstance(info, mi.StructType)
    return tuple((field.name, field.type) for field in info.fields)


def _value(kind: mi.Type, rng: random.Random) -> Any:
    """Any value of a type."""
    match kind:
        case mi.StructType():
            return example(kind.cls, rng)
        case mi.UnionType():
            return _value(rng.choice(kind.types), rng)
        case mi.LiteralType():
            return rng.choice(kind.values)
        case mi.IntType():
            return rng.choice(INTS[:-1])
        case mi.FloatType():
            return rng.choice(FLOATS)
        case mi.StrType():
            return rng.choice(TEXTS)
        case mi.BytesType():
            return rng.randbytes(rng.randrange(30))
        case mi.NoneType():
            return None
        case mi.BoolType():
            return rng.random() < 0.5
        case mi.DictType():
            return {_value(kind.key_type, rng): _value(kind.value_type, rng) for _ in range(2)}
        case mi.VarTupleType():
            return tuple(_value(kind.item_type, rng) for _ in range(rng.randrange(3)))
        case mi.TupleType():
            return tuple(_value(each, rng) for each in kind.item_types)
        case mi.ListType():
            return [_value(kind.item_type, rng) for _ in range(rng.randrange(3))]
        case mi.AnyType():
            return rng.choice((1, "x", None, [1, {"a": 2}]))
    raise AssertionError(kind)


def example(kind: type, rng: random.Random) -> Any:
    """A valid struct of a type, with odd values in it."""
    return kind(**{name: _value(each, rng) for name, each in _fields(kind)})


def message(rng: random.Random) -> Message:
    """A valid message of any kind, with odd values in it."""
    made: Message = example(rng.choice(MESSAGES), rng)
    return made


def envelope(rng: random.Random, receiver: str) -> bytes:
    """A valid envelope of any kind, mostly for `receiver`."""
    to = receiver if rng.random() < 0.9 else rng.choice(TEXTS)
    trace = (rng.choice((None, "t", "")), rng.choice((None, 3)))
    ask_id = rng.choice((*range(1, 9), *INTS))
    match rng.randrange(8):
        case 0 | 1 | 2:
            return encode_envelope(Tell("fuzz", to, *trace, message(rng)))
        case 3 | 4:
            timeout_s = rng.choice((5.0, *FLOATS))
            return encode_envelope(Request("fuzz", to, *trace, ask_id, timeout_s, message(rng)))
        case 5:
            return encode_envelope(Answer(ask_id, message(rng)))
        case 6:
            return encode_note(Failure(ask_id, rng.choice(("ActorDead", *TEXTS)), "text"))
    if rng.random() < 0.5:
        return encode_note(Watch(ask_id, to))
    return encode_note(Ended(ask_id, rng.choice(TEXTS)))


def link_frame(
    rng: random.Random, receiver: str, delivered: tuple[int, int], last: tuple[int, int]
) -> bytes:
    """A valid frame of an open link, that follows on what the receiver has `delivered` and
    acknowledges at most what it has sent.
    """
    acks = (rng.randint(0, last[0]), rng.randint(0, last[1]))
    lane = rng.randrange(2)
    seq = delivered[lane] + 1
    draw = rng.random()
    frame: Any
    if draw < 0.7:
        items = [msgspec.Raw(envelope(rng, receiver)) for _ in range(rng.choice((1, 1, 1, 2, 9)))]
        if rng.random() < 0.1:
            seq = max(1, seq - rng.randrange(4))  # some of it for the second time
        frame = Data(acks, lane, seq, items)
    elif draw < 0.72:
        return b"".join(_parcel(rng, receiver, acks, lane, seq))
    elif draw < 0.725:
        frame = _shared(rng, acks, lane, seq)
    elif draw < 0.8:
        whole = envelope(rng, receiver)
        cut = rng.randrange(len(whole) + 1)
        ends = pack(Part(acks, lane, seq, True, memoryview(whole)[:cut]))
        return bytes(ends + pack(Part(acks, lane, seq + 1, False, memoryview(whole)[cut:])))
    elif draw < 0.98:
        frame = Ack(acks)
    else:
        frame = Bye(rng.choice(TEXTS))
    return bytes(pack(frame))


def _shared(rng: random.Random, acks: tuple[int, int], lane: int, seq: int) -> Shared:
    """Arrays that lie in no file that could be read."""
    files = [FileName(rng.choice(INTS), rng.choice(INTS)) for _ in range(rng.randrange(3))]
    places = [Place(rng.choice(INTS), rng.choice(INTS), rng.choice(INTS)) for _ in range(2)]
    return Shared(acks, lane, seq, rng.choice((0, 1, 3, *INTS)), memoryview(b""), files, places)


def _parcel(
    rng: random.Random, receiver: str, acks: tuple[int, int], lane: int, seq: int
) -> list[bytes]:
    """The pieces of a message whose arrays travel beside it, some of them lost or changed."""
    light = example(GroupFinished, rng)
    sizes = rng.choices(
        (LEAST_BYTES, LEAST_BYTES + 5, LEAST_BYTES - 1), (5, 2, 1), k=rng.choice((1, 2))
    )
    arrays = [rng.randbytes(size) for size in sizes]
    slots = tuple(rng.choice((0, 1, 2, 3, rng.choice(INTS))) for _ in arrays)
    inner = encode_envelope(Tell("fuzz", receiver, None, None, light))
    sections = [msgspec.msgpack.encode(Laden(slots, msgspec.Raw(inner))), *arrays]
    if rng.random() < 0.2:
        del sections[rng.randrange(len(sections))]
    parts: list[bytes] = []
    for section in sections:
        last = len(parts) == len(sections) - 1
        part = Part(acks, lane, seq + len(parts), not last, memoryview(section), not last)
        parts.append(bytes(pack(part)))
    if rng.random() < 0.2:
        at = rng.randrange(len(parts))
        parts[at] = spoil(parts[at], rng)
    return parts


def any_link_frame(rng: random.Random) -> bytes:
    """A valid frame of an open link, at any place of any session."""
    at = (rng.choice(INTS[:8]), rng.choice(INTS[:8]))
    return link_frame(rng, "victim", (abs(at[0]), abs(at[1])), (1, 2))


def hello_frame(rng: random.Random) -> bytes:
    """A valid frame of a hello, by somebody without the key."""
    counts = (rng.choice(INTS), rng.choice(INTS))
    frames: tuple[HelloFrame, ...] = (
        Hello(
            rng.choice((PROTOCOL, PROTOCOL, PROTOCOL, *INTS)),
            rng.choice(("fuzz", *TEXTS)),
            rng.choice(("victim", "victim", *TEXTS)),
            "life",
            rng.choice(("run", "run", *TEXTS)),
            rng.randbytes(rng.choice((32, 32, 32, 0, 31, 64))),
        ),
        Proof(rng.randbytes(rng.choice((32, 32, 0, 33))), rng.choice(TEXTS), counts),
        Resume(counts),
        Welcome(),
        Reject(rng.choice(("key", "run", "busy", *TEXTS)), rng.choice(TEXTS)),
    )
    return bytes(pack(rng.choices(frames, (6, 3, 1, 1, 1))[0]))


# --- ways to spoil them


def framed(body: bytes) -> bytes:
    """Put the length in front."""
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def _flip(frame: bytes, rng: random.Random) -> bytes:
    changed = bytearray(frame)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _mark(frame: bytes, rng: random.Random) -> bytes:
    changed = bytearray(frame)
    changed[rng.randrange(HEADER_BYTES, len(changed))] = rng.choice(MARKERS)
    return bytes(changed)


def _truncate(frame: bytes, rng: random.Random) -> bytes:
    return framed(frame[HEADER_BYTES : rng.randrange(HEADER_BYTES, len(frame))])


def _cut_off(frame: bytes, rng: random.Random) -> bytes:
    return frame[: rng.randrange(1, len(frame))]


def _lie(frame: bytes, rng: random.Random) -> bytes:
    """Announce another length than that of what follows."""
    size = len(frame) - HEADER_BYTES
    said = rng.choice((0, size - 1, size + 1, 2 * size, 4097, 1 << 16, 1 << 20, 2**31, 2**32 - 1))
    return max(0, said).to_bytes(HEADER_BYTES, "big") + frame[HEADER_BYTES:]


def _splice(frame: bytes, rng: random.Random) -> bytes:
    other = any_link_frame(rng) if rng.random() < 0.5 else hello_frame(rng)
    at = rng.randrange(HEADER_BYTES, len(frame))
    return framed(frame[HEADER_BYTES:at] + other[rng.randrange(HEADER_BYTES, len(other)) :])


def _nest(frame: bytes, rng: random.Random) -> bytes:
    """Put something deep into it."""
    one = rng.choice((b"\x91", b"\x81\xa1m", b"\x92\xc0", b"\xdd\x00\x00\x00\x01"))
    deep = one * rng.choice((70, 500, 1000, 4000)) + b"\xc0"
    at = rng.randrange(HEADER_BYTES, len(frame))
    return framed(frame[HEADER_BYTES:at] + deep + frame[at + 1 :])


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        found.append((value, key))
        if isinstance(inner, list | dict):
            _places(inner, found)
    return found


def _retype(frame: bytes, rng: random.Random) -> bytes:
    """Change, drop, double or swap a value somewhere inside; all else stays a valid msgpack."""
    try:
        value = msgspec.msgpack.decode(frame[HEADER_BYTES:])
    except msgspec.MsgspecError:  # two frames in one
        return _flip(frame, rng)
    places = _places(value, []) if isinstance(value, list | dict) else []
    if not places:
        return framed(msgspec.msgpack.encode(rng.choice(ODD)))
    holder, key = rng.choice(places)
    how = rng.randrange(6)
    if how == 0 and isinstance(holder, list):
        del holder[key]
    elif how == 1 and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif how == 2:
        other, at = rng.choice(places)
        holder[key] = rng.choice((other[at], 7)) if not isinstance(other[at], list | dict) else 7
    else:
        holder[key] = rng.choice(ODD)
    return framed(msgspec.msgpack.encode(value))


def _noise(_: bytes, rng: random.Random) -> bytes:
    noise = rng.randbytes(rng.choice((1, 5, 40, 400)))
    return framed(noise) if rng.random() < 0.7 else noise


def _double(frame: bytes, rng: random.Random) -> bytes:
    return frame * rng.choice((2, 2, 3, 20))


SPOILS: dict[str, tuple[int, Callable[[bytes, random.Random], bytes]]] = {
    "flip": (20, _flip),
    "mark": (10, _mark),
    "truncate": (8, _truncate),
    "cut_off": (2, _cut_off),
    "lie": (4, _lie),
    "splice": (10, _splice),
    "nest": (4, _nest),
    "retype": (30, _retype),
    "noise": (8, _noise),
    "double": (4, _double),
}
_NAMES = tuple(SPOILS)
_WEIGHTS = tuple(weight for weight, _ in SPOILS.values())


def spoil(frame: bytes, rng: random.Random) -> bytes:
    """Return the frame, changed in one of the ways of `SPOILS`."""
    [name] = rng.choices(_NAMES, _WEIGHTS)
    return SPOILS[name][1](frame, rng)
