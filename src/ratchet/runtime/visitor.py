"""A visit to a running registry: to look at a run, to join it, or to end it.

Consumes the registry's address and the secret of the run; produces a `Visit`, whose refs work like
those of a role. Waits for the registry to be reachable, for as long as the first ask allows. A
visitor dials and cannot be dialled, and is not a role: nobody waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass

from ratchet.actors.role import REGISTRY
from ratchet.actors.system import System
from ratchet.messages import DescribeRun, EndRun, RunDescribed
from ratchet.observability.logs import Log
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.base import Ref
from ratchet.transport.mailbox.node import Node
from ratchet.transport.mailbox.wire import Wire

_LEAVE_S = 2.0


@dataclass(frozen=True)
class Visit:
    """An open link to a registry."""

    system: System
    node: Node

    @property
    def registry(self) -> Ref:
        """The registry of the run."""
        return self.system.ref(REGISTRY)

    async def describe(self, timeout_s: float) -> RunDescribed:
        """Ask what run this is, and how it does.

        Raises:
            AskTimeout: the registry cannot be reached, or does not answer.
            AuthFailed: it does not take our token or certificate.
        """
        return await self.registry.ask(DescribeRun(), block=False, timeout=timeout_s)

    def end_run(self, message: EndRun) -> None:
        """End the run everywhere; the message is on its way when the visit closes."""
        self.registry.tell(message)


@contextlib.asynccontextmanager
async def visit(
    registry: Address, *, key: bytes, log: Log, wire: Wire | None = None, run_id: str = ""
) -> AsyncIterator[Visit]:
    """Visit the registry at an address; `run_id` may be left out, and is learned."""
    system = System(
        rng=random.Random(),  # noqa: S311
        wall_time=time.time,
        new_id=lambda: uuid.uuid4().hex,
        log=log,
        loop=asyncio.get_running_loop(),
    )
    system.book.learn(REGISTRY, str(registry))
    name = f"visitor-{system.new_id()[:12]}"
    node = Node(
        name=name,
        incarnation=system.new_id()[:12],
        address=None,
        key=key,
        run_id=run_id,
        local=system.local,
        locate=system.book.locate,
        dead_letters=system.dead_letters,
        new_id=system.new_id,
        random_bytes=os.urandom,
        log=log,
        wire=wire,
    )
    system.remote = node
    await node.start()
    try:
        yield Visit(system, node)
    finally:
        await node.stop(_LEAVE_S)
