"""What a rollout worker and a reward process say to each other.

Consumes and produces frames: four bytes of length, little endian, then msgpack of one struct. The
process is not trusted: what it says is bounded and typed. Waits for nothing; each end has its own
way to read.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from ratchet.tasks.base import Conversation, Step
from ratchet.types import Prompt

PREFIX: Final = struct.Struct("<I")
MOST_ANSWER_BYTES: Final = 64 << 20
"""An answer is a number, a few lines of text, or what an environment remembers."""


class Build(msgspec.Struct, frozen=True):
    """The first words: what scores, and under which limits."""

    task: bytes
    """the section `[task]` as JSON"""
    seed: int
    path: list[str]
    """`sys.path` of the worker: the same imports find the same modules"""
    max_bytes: int
    """of address space"""


class Built(msgspec.Struct, frozen=True, tag=True):
    """The task is there: groups may come."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The task does not build here; the process ends."""

    text: str


class ScoreGroup(msgspec.Struct, frozen=True, tag=True):
    """Asks for one `Scored` per answer of the policy, in order; a `Failed` ends it."""

    prompt: Prompt
    answers: tuple[str | Conversation, ...]


class TakeStep(msgspec.Struct, frozen=True, tag=True):
    """Asks for one `Stepped` or `Failed`."""

    prompt: Prompt
    conversation: Conversation


class Scored(msgspec.Struct, frozen=True, tag=True):
    """One reward, finite."""

    reward: float


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """What the environment does."""

    step: Step


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Why the group has no rewards; see `RewardFailed`."""

    reason: str
    text: str
    clean: bool
    """whether the process may score other groups"""


def encode(message: msgspec.Struct) -> bytes:
    """Return the frame of a message."""
    body = msgspec.msgpack.encode(message)
    return PREFIX.pack(len(body)) + body
