"""Which engines keep the version that they hold: the publisher asks, whoever needs it answers.

Consumes versions as they go live; produces a yes or a no for an engine. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ratchet.types import PolicyVersion, RoleInfo


class Pins(Protocol):
    """Who keeps engines to the version that they hold."""

    def pinned(self, engine: RoleInfo) -> bool:
        """Whether the engine is not to be offered another version now."""
        ...

    def live(self, version: PolicyVersion, holders: Sequence[RoleInfo]) -> None:
        """Hear that a version is live, before any engine is offered another one."""
        ...


class NoPins:
    """Implements `Pins`: every engine takes every version."""

    def pinned(self, engine: RoleInfo) -> bool:
        """Return False."""
        del engine
        return False

    def live(self, version: PolicyVersion, holders: Sequence[RoleInfo]) -> None:
        """Do nothing."""
