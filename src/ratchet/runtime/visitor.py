"""A visit to a running registry: to look at a run, to join it, or to end it.

Consumes the registry's address and the secret of the run; produces a `Visit`, whose refs work like
those of a role. Waits for the registry to be reachable, for as long as the first ask allows. A
visitor dials and cannot be dialled, and is not a role: nobody waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

from ratchet.actors.role import REGISTRY
from ratchet.actors.system import System
from ratchet.errors import ActorDead, AskTimeout, RatchetError
from ratchet.messages import DescribeRun, EndRun, RunDescribed
from ratchet.observability.logs import Log
from ratchet.runtime.process_node import process_node
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.base import Ref
from ratchet.transport.mailbox.node import Node
from ratchet.transport.mailbox.tls import Guest
from ratchet.transport.mailbox.wire import Listener, SocketWire, Wire

VISITOR: Final = "visitor-"
"""How the names of visitors begin."""
_LEAVE_S: Final = 2.0


class NotReached(RatchetError):  # noqa: N818
    """The registry does not answer; the text says what was tried, and what came of it."""


@dataclass(frozen=True)
class Visit:
    """An open link to a registry."""

    address: Address
    system: System
    node: Node
    dials: _Dials

    @property
    def registry(self) -> Ref:
        """The registry of the run."""
        return self.system.ref(REGISTRY)

    async def describe(self, timeout_s: float) -> RunDescribed:
        """Ask what run this is, and how it does; wait for it to come up.

        Raises:
            AskTimeout: the registry cannot be reached, or does not answer.
            AuthFailed: it does not take our token or certificate.
        """
        return await self.registry.ask(DescribeRun(), block=False, timeout=timeout_s)

    async def describe_now(self, timeout_s: float) -> RunDescribed:
        """Ask the same of a registry that is to be up already.

        Raises:
            NotReached: nobody listens there, or nobody answers in time.
            AuthFailed: it does not take our token or certificate.
        """
        asked = asyncio.ensure_future(self.describe(timeout_s))
        refused = asyncio.ensure_future(self.dials.refused.wait())
        try:
            await asyncio.wait((asked, refused), return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
            raise NotReached(f"nobody listens at {self.address}: {self.dials.error}")
        except ActorDead as error:
            raise NotReached(f"the registry at {self.address} has gone: {error}") from None
        except AskTimeout:
            raise NotReached(self._silence(timeout_s)) from None
        finally:
            asked.cancel()
            refused.cancel()

    def _silence(self, timeout_s: float) -> str:
        if not self.dials.reached:
            why = self.dials.error or "no answer"
            return f"{self.address} could not be reached within {timeout_s:g} s: {why}"
        return (
            f"the registry at {self.address} did not answer within {timeout_s:g} s: its process is"
            " there, and its loop does not respond"
        )

    def end_run(self, message: EndRun) -> None:
        """End the run everywhere; the message is on its way when the visit closes."""
        self.registry.tell(message)


class _Dials:
    """A wire that remembers what came of its dials."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.reached = False
        self.refused = asyncio.Event()
        """there is nobody, and there will not soon be"""
        self.error: Exception | None = None

    async def listen(self, address: Address, accept: Callable[[], Guest]) -> Listener:
        """Listen."""
        return await self._wire.listen(address, accept)

    async def dial(self, address: Address, protocol: Callable[[], Guest]) -> None:
        """Connect."""
        try:
            await self._wire.dial(address, protocol)
        except OSError as error:
            self.error = error
            if not isinstance(error, ssl.SSLError | TimeoutError):
                self.refused.set()
            raise
        self.reached = True
        self.refused.clear()


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
    dials = _Dials(wire or SocketWire())
    name = f"{VISITOR}{system.new_id()[:12]}"
    node = process_node(
        system, name, system.new_id()[:12], address=None, key=key, run_id=run_id, wire=dials
    )
    await node.start()
    leave_s = _LEAVE_S
    try:
        yield Visit(registry, system, node, dials)
    except NotReached:
        leave_s = 0.0  # nothing that is queued will be delivered
        raise
    finally:
        await node.stop(leave_s)
