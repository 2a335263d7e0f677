"""StandbyActor: watches over the trainer of a run, and says when its place is to be taken.

Consumes the registry's news of who joins and leaves; produces one call of `vacant`, and ends with
it. Waits for the end of the trainer, which the registry tells when its process is gone, or has been
silent for `runtime.dead_s`; then for `return_s`, in which its launcher may bring it back. What
unblocks it is one of these, or the end of the run. It takes nothing but that place: no term, no
name, no memory of a device.

A run that has had no trainer yet is not begun by a standby, however long that takes to come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import assert_never

from ratchet.actors.role import RoleActor
from ratchet.actors.system import System
from ratchet.messages import (
    Down,
    Message,
    RoleJoined,
    RoleLeft,
    RoleRegistered,
    RunEnded,
    VersionUpdated,
)
from ratchet.status import Fact
from ratchet.types import RoleInfo


class NobodyReturned(Message, frozen=True):
    """To itself: the run has had no trainer for `return_s`."""


_Inbox = RoleRegistered | RoleJoined | RoleLeft | VersionUpdated | RunEnded | Down | NobodyReturned


class StandbyActor(RoleActor[_Inbox]):
    """Waits to be needed.

    Args:
        return_s: how long a trainer that has ended may take to come back.
        vacant: told once, and why.
    """

    def __init__(
        self, system: System, role: RoleInfo, *, return_s: float, vacant: Callable[[str], None]
    ) -> None:
        super().__init__(system, role)
        self._return_s = return_s
        self._vacant = vacant
        self._leaders: dict[str, RoleInfo] = {}
        self._returning: asyncio.TimerHandle | None = None
        self._why = "the run had none"

    def status(self) -> Mapping[str, Fact]:
        """Return whom it watches over."""
        return {"watches_over": ", ".join(self._leaders) or None}

    def receive(self, message: _Inbox) -> None:
        """Follow who trains."""
        match message:
            case RoleRegistered():
                # a registry that has just come back does not know yet who is there
                self._leaders |= {r.name: r for r in message.roles if r.kind == "trainer"}
                if message.versions and not self._leaders:
                    self._await_return()
            case RoleJoined():
                self.learn(message.role)
                if message.role.kind == "trainer":
                    self._leaders[message.role.name] = message.role
                    self._cancel()
            case RoleLeft():
                self.left(message.role)
                if self._leaders.get(message.role.name) == message.role:
                    del self._leaders[message.role.name]
                    self._why = f"{message.role.name} is gone: {message.reason}"
                    self._await_return()
            case NobodyReturned():
                if not self._leaders:  # else one has come at the very last moment
                    self.log.warning("takes_over", reason=self._why)
                    self._vacant(self._why)
                    self.stop()
            case RunEnded():
                self.run_ended(message)
            case Down():
                self.down(message)
            case VersionUpdated():
                pass
            case _:
                assert_never(message)

    def _await_return(self) -> None:
        if self._leaders:
            return
        self.log.warning("trainer_missed", reason=self._why, takes_over_in_s=self._return_s)
        self._cancel()
        self._returning = self.after(self._return_s, NobodyReturned())

    def _cancel(self) -> None:
        if self._returning is not None:
            self._returning.cancel()
            self._returning = None
