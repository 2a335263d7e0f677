"""What the buffer, the rollouts and the trainer have in common: they register, and hear who else is
there.

Consumes the registry's reply to `RegisterRole`, which the actor then tells itself. Waits for the
registry at the start, with a deadline; a registry that does not answer fails the role.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

from ratchet.actors.actor import Actor
from ratchet.actors.system import System
from ratchet.errors import RunFailed
from ratchet.messages import Down, EndRun, Message, RegisterRole, RoleRegistered, RunEnded
from ratchet.status import EndStatus
from ratchet.transport.mailbox.base import Ref
from ratchet.types import RoleInfo, Term

M = TypeVar("M", bound=Message)
T = TypeVar("T")

REGISTRY: Final = "registry"
BUFFER: Final = "buffer"
TRAINER: Final = "trainer-0"
ORDERLY: Final = "stopped"
"""The reason of a `Down` after an orderly stop."""
LOST: Final = "has lost the registry"
"""Words of the error of a role that ends for that, and is not to be blamed."""


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

    def on_start(self) -> None:
        """Register in the background; `RoleRegistered` follows."""
        self.spawn(self._register(), name="register")

    @property
    def registry(self) -> Ref:
        """The one registry of the run."""
        return self.system.ref(REGISTRY)

    def registry_lost(self, message: Down) -> None:
        """End this life: the registry is gone, or has given it up as silent, and its leases and
        its place among the engines with it. Whoever started it starts it again, to register anew.

        Raises:
            RunFailed: always, unless the registry has stopped in order.
        """
        if message.reason != ORDERLY:
            msg = f"{self.name} {LOST}: {message.reason}"
            raise RunFailed(msg)

    def learn(self, *roles: RoleInfo) -> None:
        """Note where roles listen."""
        for role in roles:
            self.system.book.learn(role.name, role.address, role.incarnation)

    def run_ended(self, message: RunEnded) -> None:
        """Stop in order, and leave word of why: the run is over."""
        if self.system.run_ended is None:
            self.system.run_ended = message
            self.stop()

    def end_run(self, status: EndStatus, reason: str, term: Term) -> None:
        """Stop in order, and tell everyone through the registry: the run is over."""
        self.registry.tell(EndRun(self.name, status, reason, term))
        self.run_ended(RunEnded(status, reason))

    async def wait_for(self, awaitable: Awaitable[T], *, on: str, what: str, within_s: float) -> T:
        """Wait for something that another party will tell, visibly and with a deadline.

        Raises:
            RunFailed: if it does not come in time; the text says who waited, on whom, for what.
        """
        since = self.now()
        waits = self.system.waits
        try:
            with waits.on(who=self.name, on=on, what=what, since=since, until=since + within_s):
                async with asyncio.timeout(within_s):
                    return await awaitable
        except TimeoutError:
            msg = f"{self.name} waited {within_s} s (trainer.batch_timeout_s) on {on} for {what}"
            raise RunFailed(msg) from None

    async def _register(self) -> None:
        reply: RoleRegistered = await self.ask(self.registry, RegisterRole(self.role))
        self.learn(*reply.roles)
        self.registry.watch(self.actor_ref)
        self.actor_ref.tell(reply)
