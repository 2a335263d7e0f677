"""An engine's end of the direct transport: its worker brings the servers together with the trainer.

Consumes a manifest and a route, produces a loaded engine. Waits for the trainer on the thread of a
link, and for the servers on the event loop, for `timeout_s` in all; an abort or a cancellation
unblocks it at once. The servers themselves are unblocked by the trainer, which drops their group.

The order is pause, load, stamp, resume, and the pause begins with the first bucket, as a server has
no memory to stage in. Nothing that arrives can be looked at here: the trailer says which version it
was, and the engine's own proof, before it stamps, that the servers generate with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import torch

from ratchet.config import WeightsConfig
from ratchet.errors import TransferFailed, WeightsMismatch
from ratchet.transport.weights.base import LoadReport, ProbedSink, WeightSink
from ratchet.transport.weights.deadline import Deadline
from ratchet.transport.weights.digest import trailer_digest
from ratchet.transport.weights.finalize import proof_of
from ratchet.transport.weights.link import Link
from ratchet.transport.weights.meeting import GRACE_S, Go, Ready, announce, wait_for_go
from ratchet.transport.weights.outside import (
    DirectSink,
    Meeting,
    OutsideServers,
    Stretch,
    group_of,
    stretches_of,
)
from ratchet.transport.weights.plan import check_specs, slots_by_bucket
from ratchet.transport.weights.scope import LoadScope
from ratchet.types import PauseMode, WeightManifest, WeightRoute

_HOST = torch.device("cpu")


class DirectReceiver:
    """One transfer at a time."""

    def __init__(self, config: WeightsConfig) -> None:
        """Hold no link yet."""
        self._config = config
        self._link: Link | None = None
        self._scope: LoadScope | None = None
        """of the pending `receive`"""
        self._servers: OutsideServers | None = None
        self._joined: str | None = None
        """the group that the servers are in, as far as it is whole"""
        self._stale: list[str] = []
        """groups that they have yet to leave"""

    async def receive(
        self, manifest: WeightManifest, route: WeightRoute, sink: WeightSink, mode: PauseMode
    ) -> LoadReport:
        """Take a version into the servers of the sink."""
        if self._scope is not None:
            msg = "this engine is still receiving an earlier version; abort that first"
            raise TransferFailed(msg)
        late = f"version {manifest.version} was not loaded within {route.timeout_s:g} s"
        self._scope = LoadScope(route.timeout_s + GRACE_S, late)
        try:
            return await self._scope.run(
                self._receive(manifest, route, sink, mode, self._scope.commit)
            )
        finally:
            self._scope = None

    def abort(self, reason: str) -> None:
        """End a pending `receive`, unless it has begun to stamp the version."""
        if self._scope is not None:
            self._scope.abort(reason)

    async def close(self) -> None:
        """Leave the groups, as far as the servers still answer."""
        self.abort("the engine closes")
        link, self._link = self._link, None
        if link is not None:
            await link.close(GRACE_S)
        self._forget()
        with contextlib.suppress(TransferFailed, TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self._leave()

    async def _receive(
        self,
        manifest: WeightManifest,
        route: WeightRoute,
        sink: WeightSink,
        mode: PauseMode,
        commit: Callable[[], None],
    ) -> LoadReport:
        link = self._connect(route)
        try:
            servers = _servers_of(sink)
            _check(manifest, sink)
            if isinstance(sink, ProbedSink):
                sink.expect(proof_of(manifest) if self._config.verify else None)
            self._servers = servers
            await self._leave()
        except (TransferFailed, WeightsMismatch) as error:
            await _refuse(link, route, 1, str(error))
            raise
        load = _Load(manifest, route, link, servers)
        try:
            return await self._take(load, sink, mode, commit)
        except asyncio.CancelledError:
            self._forget()
            self._abandon()
            raise
        except BaseException as error:
            self._forget()
            if not load.has_all:
                await _refuse(link, route, load.number + 1, str(error))
            with contextlib.suppress(TransferFailed):  # or else before the next transfer
                await self._leave()  # the trainer waits for them no longer
            raise

    async def _take(
        self, load: _Load, sink: WeightSink, mode: PauseMode, commit: Callable[[], None]
    ) -> LoadReport:
        now = asyncio.get_running_loop().time
        start = now()
        group = await load.meet(self._joined)
        if group != self._joined:
            self._forget()
            self._joined = group
            await load.join(group)
            await self._leave()
        paused = now()
        try:
            await sink.pause(mode)
            digest = await load.run(group)
            moved = now()
            commit()
            await sink.stamp(load.manifest.version)
        finally:
            resumed = asyncio.ensure_future(sink.resume())  # noqa: TID251 - outlives its cancelled load
            await asyncio.shield(resumed)
        end = now()
        return LoadReport(digest, moved - start, end - moved, end - paused)

    def _connect(self, route: WeightRoute) -> Link:
        """Return the link to the trainer of this route, a new one if it is another trainer."""
        link = self._link
        if link is None or link.is_abandoned or (link.host, link.port) != (route.host, route.port):
            self._abandon()
            self._forget()
            link = self._link = Link(route.host, route.port, "ratchet-weights-receive", _HOST)
        return link

    def _abandon(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.abandon()

    def _forget(self) -> None:
        """Have the servers leave their group, when they next answer."""
        if self._joined is not None:
            self._stale.append(self._joined)
        self._joined = None

    async def _leave(self) -> None:
        """Leave what is stale.

        Raises:
            TransferFailed: if a server does not answer.
        """
        while self._stale and self._servers is not None:
            for server in range(len(self._servers.sizes)):
                await self._servers.release(server, group_of(self._stale[0], server))
            self._stale.pop(0)


class _Load:
    """One transfer into the servers."""

    def __init__(
        self, manifest: WeightManifest, route: WeightRoute, link: Link, servers: OutsideServers
    ) -> None:
        self.manifest = manifest
        self.number = 0
        """of the round"""
        self.has_all = False
        """and the trainer knows"""
        self._route = route
        self._link = link
        self._servers = servers
        self._deadline = Deadline(route.timeout_s + GRACE_S)

    async def meet(self, holds: str | None) -> str:
        """Return the group that the servers are to be in."""
        sizes = tuple(self._servers.sizes)
        go = await self._round(Ready(self._route.rank, holds, outside=sizes))
        assert go.group is not None  # noqa: S101 - else `wait_for_go` has raised
        return go.group

    async def join(self, group: str) -> None:
        """Have the servers join, one after another, as the trainer waits for them."""
        route = self._route
        for server, size in enumerate(self._servers.sizes):
            meeting = Meeting(
                route.host, route.port, group_of(group, server), size + 1, route.backend
            )
            await self._servers.join(server, meeting, self._deadline.left_s)

    async def run(self, group: str) -> str:
        """Have the servers take every bucket; return the digest of what was sent."""
        buckets = slots_by_bucket(self.manifest)
        await self._servers.begin()
        for slots in buckets:
            for stretch in stretches_of(slots):
                await self._load(group, stretch)
        rank = self._route.rank
        go = await self._round(Ready(rank, group, len(buckets)))
        digest = trailer_digest(self.manifest, go.trailer)
        await self._announce(Ready(rank, group, len(buckets) + 1))
        self.has_all = True
        return digest

    async def _load(self, group: str, stretch: Stretch) -> None:
        left_s = self._deadline.left_s
        try:
            async with asyncio.TaskGroup() as tasks:
                for server in range(len(self._servers.sizes)):
                    name = group_of(group, server)
                    tasks.create_task(self._servers.load(server, name, stretch.slots, left_s))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _round(self, ready: Ready) -> Go:
        await self._announce(ready)
        link, route, number, deadline = self._link, self._route, self.number, self._deadline
        return await link.run(lambda: wait_for_go(link, route, number, deadline))

    async def _announce(self, ready: Ready) -> None:
        self.number += 1
        link, route, number, deadline = self._link, self._route, self.number, self._deadline
        await link.run(lambda: announce(link, route, number, ready, deadline))


def _servers_of(sink: WeightSink) -> OutsideServers:
    servers = sink.outside if isinstance(sink, DirectSink) else None
    if servers is None:
        msg = "this engine has no server that could take weights from the trainer"
        raise TransferFailed(msg)
    return servers


def _check(manifest: WeightManifest, sink: WeightSink) -> None:
    owners = check_specs(manifest, sink.specs())
    untied = {name: own for name, own in owners.items() if own != (name,)}
    if untied:
        name, own = next(iter(untied.items()))
        msg = (
            f"{name} would have to be loaded as {', '.join(own) or 'nothing'}: servers take"
            " parameters by the name under which they travel, and each once"
        )
        raise WeightsMismatch(msg)


async def _refuse(link: Link, route: WeightRoute, number: int, failure: str) -> None:
    """Tell the trainer that this engine takes part no longer; it may be gone as well."""
    ready = Ready(route.rank, None, failure=failure)
    with contextlib.suppress(TransferFailed):
        await link.run(lambda: announce(link, route, number, ready, Deadline(GRACE_S)))
