"""A run without its trainer: how long it waits for another life of it, or for a standby.

Consumes the ends and the joins of trainers, from the registry; produces a row in the table of
waits, and after `wait_s` seconds one call of `missed`. What unblocks it is a trainer that joins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from ratchet.actors.role import ORDERLY, REGISTRY, TRAINER
from ratchet.actors.system import System
from ratchet.types import RoleInfo

_NONE: Final = "none has registered since the registry started"


class Vacancy:
    """Open as long as the run has no trainer, and has had one.

    Args:
        system: whose table of waits shows it.
        wait_s: seconds from its opening to `missed`.
        now: monotonic time.
        missed: told why the run cannot go on.
    """

    def __init__(
        self,
        system: System,
        *,
        wait_s: float,
        now: Callable[[], float],
        missed: Callable[[str], None],
    ) -> None:
        self._system = system
        self._wait_s = wait_s
        self._now = now
        self._missed = missed
        self._trainers: set[RoleInfo] = set()
        self._open = ExitStack()

    def joined(self, role: RoleInfo) -> None:
        """A role has come."""
        if role.kind == "trainer":
            self._trainers.add(role)
            self.close()

    def left(self, role: RoleInfo, reason: str) -> None:
        """A role has gone; a trainer that has stopped in order is waited for by nobody."""
        if role in self._trainers:
            self._trainers.remove(role)
            if reason != ORDERLY and not self._trainers:
                self.open(role.name, reason)

    def open(self, name: str = TRAINER, reason: str = _NONE) -> None:
        """Begin to wait."""
        self.close()
        since, what = self._now(), f"another life of it, or a standby ({reason})"
        wait = self._system.waits.on(
            who=REGISTRY, on=name, what=what, since=since, until=since + self._wait_s
        )
        self._open.enter_context(wait)
        why = (
            f"{name} is gone ({reason}), and no trainer has come within {self._wait_s:g} s"
            " (runtime.trainer_wait_s)"
        )
        timer = asyncio.get_running_loop().call_later(self._wait_s, self._missed, why)
        self._open.callback(timer.cancel)

    def close(self) -> None:
        """Wait no more."""
        self._open.close()
