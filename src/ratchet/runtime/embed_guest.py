"""A guest of a run: what the run is, and a node for each role that the guest takes.

Consumes an `Invitation`, produces a `Host` and its members, all of them on one event loop. Waits
for the registry at the start, as long as it is told to.
"""

from __future__ import annotations

import asyncio
import tempfile
import tomllib
import uuid
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final, TypeVar

from ratchet.actors.actor import LocalRef
from ratchet.actors.role import ORDERLY, REGISTRY
from ratchet.actors.system import System
from ratchet.config import parse_config
from ratchet.errors import RatchetError, RunFailed, from_wire
from ratchet.messages import EndRun, RunDescribed
from ratchet.observability.logs import Log
from ratchet.runtime.embed_link import Invitation, StandardLog
from ratchet.runtime.process_node import limits_of, process_node, role_system
from ratchet.runtime.reporter import Reporter
from ratchet.runtime.role import EndOfActor
from ratchet.runtime.visitor import Visit, visit
from ratchet.status import RunStatus
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.node import Node
from ratchet.transport.mailbox.wire import SocketWire
from ratchet.types import RoleInfo, RoleKind

T = TypeVar("T")

_LEAVE_S: Final = 2.0


def _visit(invitation: Invitation) -> AbstractAsyncContextManager[Visit]:
    return visit(
        invitation.registry,
        key=invitation.credentials.key,
        log=StandardLog(),
        wire=SocketWire(invitation.credentials),
    )


class Host:
    """A run, as its guest knows it; on the background loop only."""

    def __init__(
        self,
        invitation: Invitation,
        described: RunDescribed,
        *,
        timeout_s: float,
        log: Log | None = None,
    ) -> None:
        text = tomllib.loads(described.config)
        self.config = parse_config(text, "the configuration of the run")
        self.run_id = described.run_id
        self.invitation = invitation
        self._timeout_s = timeout_s
        self._log = log or StandardLog()
        self._files = tempfile.TemporaryDirectory(prefix="ratchet-")  # mode 0700
        self._members: list[Member] = []

    @classmethod
    async def enter(cls, invitation: Invitation, timeout_s: float) -> Host:
        """Ask the registry what run it is.

        Raises:
            AskTimeout: it cannot be reached in time.
            AuthFailed: it does not take our token or certificate.
        """
        async with _visit(invitation) as registry:
            described = await registry.describe(timeout_s)
        return cls(invitation, described, timeout_s=timeout_s)

    async def status(self) -> RunStatus:
        """Return the run as its registry sees it."""
        async with _visit(self.invitation) as registry:
            return (await registry.describe(self._timeout_s)).status

    async def end(self, reason: str) -> None:
        """End the run everywhere."""
        async with _visit(self.invitation) as registry:
            registry.end_run(EndRun("guest", "stopped", reason))

    def base_model(self) -> Path:
        """Return the directory of the base model; one that is built is the same everywhere."""
        from ratchet.runtime.base_model import ensure_base_model

        directory = self.invitation.directory
        base = directory.base if directory is not None else Path(self._files.name) / "base"
        return ensure_base_model(self.config, base)

    async def new_member(self, kind: RoleKind, name: str | None) -> Member:
        """Open the node of a role; its actor is still to be started."""
        incarnation = uuid.uuid4().hex[:12]
        name = name or f"{kind}-{incarnation[:8]}"
        system = role_system(self.config, name, self._log)
        node = process_node(
            system,
            name,
            incarnation,
            address=self._listen(name),
            key=self.invitation.credentials.key,
            run_id=self.run_id,
            wire=SocketWire(self.invitation.credentials),
            limits=limits_of(self.config),
        )
        system.links = node.links
        system.book.learn(REGISTRY, str(self.invitation.registry))
        await node.start()
        member = Member(system, node, RoleInfo(kind, name, incarnation, str(node.address)))
        self._members.append(member)
        return member

    def _listen(self, name: str) -> Address:
        if self.invitation.registry.kind == "unix":
            return Address("unix", f"{self._files.name}/{name}.sock")
        return Address("tcp", self.invitation.host, 0)

    async def leave(self) -> None:
        """Let every role go in order; the run goes on without them. Idempotent."""
        while self._members:
            await self._members.pop().leave()
        self._files.cleanup()


class Member:
    """A role that the guest has taken, and how it ended."""

    def __init__(self, system: System, node: Node, role: RoleInfo) -> None:
        self.system = system
        self.role = role
        self._node = node
        self._ref: LocalRef | None = None
        self._end = EndOfActor(role.name)
        self._reporter: Reporter | None = None

    @property
    def ref(self) -> LocalRef:
        """The actor."""
        if self._ref is None:
            msg = f"{self.role.name} was not started"
            raise RuntimeError(msg)
        return self._ref

    def started(self, ref: LocalRef, report_every_s: float) -> None:
        """Take the actor in, and report of it to the registry."""
        self._ref = ref
        ref.watch(self._end)
        self._reporter = Reporter(
            self.system, self.role, every_s=report_every_s, open_asks=self._node.waits
        )
        self._reporter.start()

    async def or_end(self, work: asyncio.Future[T]) -> T | None:
        """Wait for `work`, or for the end of the role: None if that was in order.

        Raises:
            RatchetError: what the role has failed with, or how the run has.
        """
        waits: set[asyncio.Future[Any]] = {work, self._end.reason}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        work.cancel()
        self._raise_failure()
        return None

    async def ended(self) -> None:
        """Wait for the end of the role.

        Raises:
            RatchetError: what it has failed with, or how the run has.
        """
        await asyncio.shield(self._end.reason)
        self._raise_failure()

    def over(self) -> RunFailed:
        """Return the error for whoever goes on although the role has ended."""
        ended = self.system.run_ended
        why = "it was closed" if ended is None else f"the run is over: {ended.reason}"
        return RunFailed(f"{self.role.name} takes no more: {why}")

    def _raise_failure(self) -> None:
        reason = self._end.reason.result()
        ended = self.system.run_ended
        if reason != ORDERLY:
            raise _error_of(self.role.name, reason)
        if ended is not None and ended.status == "failed":
            msg = f"the run has failed: {ended.reason}"
            raise RunFailed(msg)

    async def leave(self) -> None:
        """End the actor and the node."""
        if self._ref is not None:
            await self._ref.stop(block=False)
        if self._reporter is not None:
            self._reporter.stop()
        await self._node.stop(_LEAVE_S)


def _error_of(name: str, reason: str) -> RatchetError:
    """Rebuild the error with which an actor ended from "ErrorClass: text"."""
    kind, _, text = reason.partition(": ")
    if kind in {"RunFailed", "ValueError"}:
        return RunFailed(text)
    error = from_wire(kind, text)
    return error if type(error).__name__ == kind else RunFailed(f"{name} has failed: {reason}")
