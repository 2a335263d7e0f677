"""What the buffer, the rollouts and the trainer have in common: they register, and hear who else is
there.

Consumes the registry's reply to `RegisterRole`, which the actor then tells itself. Waits for the
registry, at the start, with each ask, and whenever it is away: visibly, and for at most
`System.registry_wait_s` seconds; then the role fails, and names it. What unblocks the wait is a
registry at the old address: the same one after a cut, or its next life, which knows the versions
and the terms, and nobody. So each role registers again. Whoever this one knew and the new registry
does not is watched, and left for dead when its link says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import AbstractContextManager
from typing import Final, TypeVar

from ratchet.actors.actor import Actor
from ratchet.actors.system import System
from ratchet.errors import ActorDead, AskTimeout, GivenUp, RunFailed
from ratchet.messages import (
    Ask,
    Down,
    EndRun,
    Message,
    RegisterRole,
    RoleLeft,
    RoleRegistered,
    RunEnded,
)
from ratchet.status import EndStatus
from ratchet.transport.mailbox.base import Ref
from ratchet.types import RoleInfo, Term

M = TypeVar("M", bound=Message)
R = TypeVar("R")
T = TypeVar("T")

REGISTRY: Final = "registry"
BUFFER: Final = "buffer"
TRAINER: Final = "trainer-0"
ORDERLY: Final = "stopped"
"""The reason of a `Down` after an orderly stop."""
LOST: Final = "has lost the registry"
"""Words of the error of a role that ends for that, and is not to be blamed."""
TAKEN: Final = "a newer process has taken the name"
"""How a node refuses the link of a process that another one has replaced (`Node`)."""
_PAUSE_S: Final = 0.2
"""Between two tries to reach a registry that is away."""


def rollout_name(rank: int) -> str:
    """Return the name of a rollout worker."""
    return f"rollout-{rank}"


def evaluator_name(rank: int) -> str:
    """Return the name of a worker that only evaluates."""
    return f"evaluator-{rank}"


class RoleActor(Actor[M]):
    """An actor that the registry knows. The registry's reply comes back as a message."""

    def __init__(self, system: System, role: RoleInfo) -> None:
        super().__init__(system, role.name)
        self.role = role
        self._others: dict[str, RoleInfo] = {}
        """who is there, as far as this role hears of it"""
        self._missed: dict[str, RoleInfo] = {}
        """those of them that have not registered with the new registry"""

    def on_start(self) -> None:
        """Register in the background; `RoleRegistered` follows."""
        self.spawn(self._register(), name="register")

    @property
    def registry(self) -> Ref:
        """The one registry of the run."""
        return self.system.ref(REGISTRY)

    def life_of(self, name: str) -> str:
        """Return the incarnation of another role; empty as long as it is not known to be there."""
        other = self._others.get(name)
        return "" if other is None else other.incarnation

    def down(self, message: Down) -> None:
        """Hear of an end: of the registry, which is then looked for; or of a role that the new
        registry has not heard of, and that has left then.
        """
        if message.name == REGISTRY:
            if self.system.run_ended is None:
                self.log.warning("registry_lost", reason=message.reason)
                self.spawn(self._register(), name="register-again")
            return
        if message.name == BUFFER:
            self.say_again()
        role = self._missed.pop(message.name, None)
        if role is not None and self._others.get(role.name) == role:
            self.actor_ref.tell(RoleLeft(role, message.reason))

    def buffer_joined(self) -> None:
        """Tell a new life of the buffer what it has to know, and once more when the link to the
        life before ends: the registry's word of it may be here first, and what was said in between
        is lost.
        """
        self.system.ref(BUFFER).watch(self.actor_ref)
        self.say_again()

    def say_again(self) -> None:
        """Tell the buffer what it has to know."""

    def learn(self, *roles: RoleInfo) -> None:
        """Note who is there, and where. If that ends a life of which nobody has told that it has
        left, tell itself.
        """
        for role in roles:
            self.system.book.learn(role.name, role.address, role.incarnation)
            before = self._others.get(role.name)
            self._others[role.name] = role
            self._missed.pop(role.name, None)  # else the end of another process of the name is its
            if before is not None and before.incarnation != role.incarnation:
                self.actor_ref.tell(RoleLeft(before, "replaced by a new incarnation"))

    def left(self, role: RoleInfo) -> None:
        """Note that a role is not there any more."""
        if self._others.get(role.name) == role:
            del self._others[role.name]

    def run_ended(self, message: RunEnded) -> None:
        """Stop in order, and leave word of why: the run is over."""
        if self.system.run_ended is None:
            self.system.run_ended = message
            self.stop()

    def end_run(self, status: EndStatus, reason: str, term: Term) -> None:
        """Stop in order, and tell everyone through the registry: the run is over."""
        self.registry.tell(EndRun(self.name, status, reason, term))
        self.run_ended(RunEnded(status, reason))

    async def ask(self, ref: Ref, message: Ask[R], *, timeout: float | None = None) -> R:
        """Ask, and ask a registry that is away again: all that it is asked may be repeated.

        Raises:
            RunFailed: if the registry stays away for `System.registry_wait_s` seconds, or another
                process has this role's name.
            RatchetError: as `Actor.ask` says.
        """
        if ref.name != REGISTRY:
            return await super().ask(ref, message, timeout=timeout)
        what = type(message).__name__
        until = self.now() + self.system.registry_wait_s
        while True:
            try:
                return await super().ask(ref, message, timeout=timeout)
            except (ActorDead, AskTimeout) as error:
                if TAKEN in str(error):  # and it will not be given back
                    raise RunFailed(f"{self.name} {LOST}: {error}") from None
                if self.now() + _PAUSE_S >= until:
                    msg = (
                        f"{self.name} {LOST}: it has not answered {what} within"
                        f" {self.system.registry_wait_s:g} s (runtime.registry_wait_s): {error}"
                    )
                    raise RunFailed(msg) from None
            with self._waiting(on=REGISTRY, what=f"its next life, for {what}", until=until):
                await asyncio.sleep(_PAUSE_S)

    async def wait_for(self, awaitable: Awaitable[T], *, on: str, what: str, within_s: float) -> T:
        """Wait for something that another party will tell, visibly and with a deadline.

        Raises:
            RunFailed: if it does not come in time; the text says who waited, on whom, for what.
        """
        try:
            with self._waiting(on=on, what=what, until=self.now() + within_s):
                async with asyncio.timeout(within_s):
                    return await awaitable
        except TimeoutError:
            msg = f"{self.name} waited {within_s} s (trainer.batch_timeout_s) on {on} for {what}"
            raise RunFailed(msg) from None

    def _waiting(self, *, on: str, what: str, until: float) -> AbstractContextManager[None]:
        return self.system.waits.on(who=self.name, on=on, what=what, since=self.now(), until=until)

    async def _register(self) -> None:
        before = dict(self._others)
        try:
            reply: RoleRegistered = await self.ask(self.registry, RegisterRole(self.role))
        except GivenUp as error:
            msg = f"{self.name} {LOST}: {error}"
            raise RunFailed(msg) from None
        there = {role.name: role for role in reply.roles if role.name != self.name}
        for name in there | before:  # what was heard meanwhile is newer
            if self._others.get(name) == before.get(name):
                self._adopt(name, there.get(name))
        self.system.book.learn(self.name, self.role.address, self.role.incarnation)
        self.registry.watch(self.actor_ref)
        self.actor_ref.tell(reply)

    def _adopt(self, name: str, role: RoleInfo | None) -> None:
        if role is not None:
            self.learn(role)
        else:
            self._missed[name] = self._others[name]
            self.system.ref(name).watch(self.actor_ref)
