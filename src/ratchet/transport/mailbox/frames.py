"""What travels on a link: frames, and the envelopes that ride in them.

A frame is one of a closed union: `HelloFrame` before both ends have proved who they are,
`LinkFrame` after. Envelopes ride in frames, messages in envelopes. `codec` says how they become
bytes.

Two lanes: `CONTROL` and `BULK`. What carries token ids or prompts (`BULK_MESSAGES`) goes on the
bulk lane, and so do answers larger than one fragment; all else is control. Within a lane messages
between two actors stay in order; between lanes a control message may overtake bulk. The lane
follows from the type of a message, not from its size, because order matters more to a command than
speed does; only an answer, which follows on nothing but its question, is sorted by size.
"""

from __future__ import annotations

from typing import Final, Generic, TypeAlias, TypeVar

import msgspec

from ratchet.messages import BatchReady, GroupFailed, GroupFinished, Message, PromptsClaimed
from ratchet.transport.mailbox.shared import FileName, Place
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
