"""One group that is not gone yet, as the buffer holds it in memory.

Pure data: the group table makes and moves it, everybody else reads it.
"""

from __future__ import annotations

import msgspec

from ratchet.actors.window import Made
from ratchet.storage.groups import GroupRow
from ratchet.types import PolicyVersion, Prompt, RolloutGroup


class Entry(msgspec.Struct, eq=False, gc=False):
    """It is in no cycle, and there are tens of thousands: the garbage collector need not walk
    through them.
    """

    group_id: int
    epoch: int
    prompt: Prompt
    attempt: int = 0
    retries: int = 0
    reissues: int = 0
    worker: str = ""
    incarnation: str = ""
    base: PolicyVersion = 0
    """in flight: no token of it is older"""
    claimed_at: float = 0.0
    lease_end: float = 0.0
    group: RolloutGroup | None = None
    versions: tuple[PolicyVersion, ...] = ()
    num_bytes: int = 0
    """of the group's arrays, as they came in"""
    staleness: int = 0
    """of the oldest token that is trained, when it was last judged"""
    masked: str = ""
    """why a part of it is not trained"""
    made: Made | None = None
    """queued or batched: for the counters; None if it was batched in an earlier life"""

    @classmethod
    def of(cls, row: GroupRow, prompt: Prompt) -> Entry:
        """Return what an earlier life of the buffer has left of a group."""
        return cls(
            row.group_id,
            row.epoch,
            prompt,
            attempt=row.attempt,
            retries=row.retries,
            staleness=row.staleness or 0,
        )
