"""What a role says of itself, and what the registry knows of a run: the types of `ratchet status`.

Consumes nothing, waits for nothing. Times are durations in seconds, measured by the monotonic clock
of whoever reports: clocks of two machines are never compared.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from ratchet.types import PolicyVersion, RoleInfo, RoleKind, Term, VersionRecord

Fact: TypeAlias = int | float | str | bool | None
EndStatus = Literal["finished", "stopped", "failed"]


class WaitRow(msgspec.Struct, frozen=True):
    """Who waits, on whom, for what, for how long, and how long it still will."""

    who: str
    on: str
    what: str
    waited_s: float
    left_s: float


class LinkRow(msgspec.Struct, frozen=True):
    """One link of a process. The process at its other end may live while its loop does not
    respond: `connected` tells the one, `silent_s` the other.
    """

    peer: str
    connected: bool
    silent_s: float
    num_queued: int
    num_in_flight: int
    trouble: str | None = None


class DeadLetterRow(msgspec.Struct, frozen=True):
    """Messages that could not be delivered, counted by what they have in common."""

    sender: str | None
    receiver: str
    message: str
    reason: str
    count: int


class RoleReport(msgspec.Struct, frozen=True):
    """What a role's process says of itself, once per `runtime.heartbeat_s`."""

    kind: RoleKind
    name: str
    incarnation: str
    pid: int
    host: str
    uptime_s: float
    loop_lag_s: float
    """the longest time since the last report that the event loop was late by"""
    mailboxes: dict[str, int]
    """messages that wait to be handled, by actor"""
    facts: dict[str, Fact]
    """what the role's actor says: versions held, queue sizes, groups in flight ..."""
    waits: tuple[WaitRow, ...]
    links: tuple[LinkRow, ...]
    num_dead_letters: int
    dead_letters: tuple[DeadLetterRow, ...]
    """the most frequent ones"""


class RoleStatus(msgspec.Struct, frozen=True):
    """A role as the registry sees it."""

    role: RoleInfo
    up: bool
    """it has registered, and has not left"""
    connected: bool
    """its process: a connection to it is open"""
    silent_s: float
    """its loop: nothing was heard of it for so long"""
    num_starts: int
    """lives of that name that have registered"""
    suspected: bool = False
    """silent for `runtime.suspect_s` or longer"""
    report: RoleReport | None = None
    report_age_s: float | None = None
    reason: str | None = None
    """why it left; None for one that is up, or that starts and has not registered yet"""


class RunStatus(msgspec.Struct, frozen=True):
    """A run at one moment, as its registry sees it."""

    name: str
    uptime_s: float
    """of this life of the registry"""
    term: Term
    live: VersionRecord | None
    """the newest live version"""
    newest: PolicyVersion | None
    """the newest number that was ever reserved"""
    num_burnt: int
    roles: tuple[RoleStatus, ...]
    """the registry; those that are up, in the order in which they joined; those that start; those
    that left
    """
    suspect_s: float = 5.0
    """silence after which a role is suspected"""
    end: EndStatus | None = None
    end_reason: str | None = None

    @property
    def is_trained(self) -> bool:
        """A version that an optimiser step has made is live."""
        return self.live is not None and self.live.step > 0
