"""What the sides of the buffer share: one that takes groups in, and one that hands them out.

Consumes nothing, waits for nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from ratchet.actors.buffer_policy import Policy
from ratchet.actors.buffer_stats import BufferCounts
from ratchet.actors.group_table import GroupTable
from ratchet.actors.issuing import Issuing
from ratchet.actors.judging import Judging
from ratchet.actors.known_versions import KnownVersions
from ratchet.observability.logs import Log


class BufferParts(NamedTuple):
    """The parts of one life of the buffer."""

    table: GroupTable
    known: KnownVersions
    judging: Judging
    issuing: Issuing
    counts: BufferCounts
    policy: Policy
    log: Log
