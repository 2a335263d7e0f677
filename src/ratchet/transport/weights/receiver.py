"""An engine's end of every transport: takes part in a transfer by its route, whatever that is.

Consumes what the trainer sends, produces a loaded engine. Waits for the trainer on the thread of a
link, for `timeout_s` in all; an abort or a cancellation unblocks it at once, and leaves a thread
that is stuck behind. One link for each transport: who catches up point to point stays in the group
of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final

import torch

from ratchet.config import WeightsConfig
from ratchet.errors import TransferFailed, WeightsMismatch
from ratchet.transport.weights.base import LoadReport, WeightSink
from ratchet.transport.weights.deadline import Deadline
from ratchet.transport.weights.finalize import finalize
from ratchet.transport.weights.groups import check_backend, device_of
from ratchet.transport.weights.inbox import EngineStuck, Inbox
from ratchet.transport.weights.link import Link
from ratchet.transport.weights.meeting import (
    GRACE_S,
    Go,
    Ready,
    announce,
    patience_s,
    wait_for_go,
)
from ratchet.transport.weights.pieces import large_bytes
from ratchet.transport.weights.plan import check_specs
from ratchet.transport.weights.scope import LoadScope
from ratchet.transport.weights.shared_door import SHARED, host_id
from ratchet.transport.weights.staging import NUM_STAGING, staging_sizes
from ratchet.transport.weights.stream import receive_round
from ratchet.types import PauseMode, WeightManifest, WeightRoute

_HOST: Final = torch.device("cpu")


class Receiver:
    """One transfer at a time."""

    def __init__(self, kept: str, config: WeightsConfig) -> None:
        """Hold no link yet.

        Args:
            kept: the transport whose link outlives a transfer.
            config: the section `weights`.
        """
        self._kept = kept
        self._config = config
        self._links: dict[str, Link] = {}
        """by transport"""
        self._scope: LoadScope | None = None
        """of the pending `receive`"""

    async def receive(
        self, manifest: WeightManifest, route: WeightRoute, sink: WeightSink, mode: PauseMode
    ) -> LoadReport:
        """Take a version into the sink."""
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
            self._keep_links(route)

    def abort(self, reason: str) -> None:
        """End a pending `receive`, unless it has begun to stamp the version."""
        if self._scope is not None:
            self._scope.abort(reason)

    async def close(self) -> None:
        """Leave the groups."""
        self.abort("the engine closes")
        links, self._links = self._links, {}
        await asyncio.gather(*(link.close(GRACE_S) for link in links.values()))

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
            check_backend(route.backend)
            owners = check_specs(manifest, sink.specs())
        except (TransferFailed, WeightsMismatch) as error:
            ready = Ready(route.rank, link.holds, failure=str(error))
            with contextlib.suppress(TransferFailed):
                await link.run(lambda: announce(link, route, 1, ready, Deadline(route.timeout_s)))
            raise
        inbox = Inbox(
            len(manifest.bucket_bytes), self._staging_sizes(manifest, route), link.hand_over
        )
        host = host_id() if self._config.shared_memory else ""
        taken = link.run(lambda: _take(link, manifest, route, inbox, host))
        taken.add_done_callback(inbox.ended)
        try:
            return await finalize(
                manifest, owners, inbox, sink, mode, verify=self._config.verify, commit=commit
            )
        except (TransferFailed, asyncio.CancelledError):
            taken.cancel()
            self._abandon(route)
            raise
        except WeightsMismatch:
            link.run(link.reader.leave)  # pages that were written to here are the trainer's no more
            raise
        finally:
            # where the engine failed, the rest is received all the same: the others go on
            inbox.drain()

    def _staging_sizes(self, manifest: WeightManifest, route: WeightRoute) -> Sequence[int]:
        limit = int(self._config.staging_mib * 2**20)
        sizes = staging_sizes(manifest.bucket_bytes, limit)
        if route.transport == SHARED and len(sizes) < len(manifest.bucket_bytes):
            return sizes[:NUM_STAGING]  # they are written from where the trainer has them
        return sizes

    def _connect(self, route: WeightRoute) -> Link:
        """Return the link to the trainer of this route, a new one if it is another trainer."""
        link = self._links.get(route.transport)
        if link is None or (link.host, link.port) != (route.host, route.port):
            self._abandon(route)
            device = device_of(route.backend)
            link = Link(route.host, route.port, "ratchet-weights-receive", device)
            self._links[route.transport] = link
        return link

    def _keep_links(self, route: WeightRoute) -> None:
        """Keep one link: that of the transport, or that to a trainer on the same host. To catch up
        changes nothing.
        """
        if route.transport not in {self._kept, SHARED}:
            self._abandon(route)
            return
        for name in [name for name in self._links if name != route.transport]:
            self._links.pop(name).abandon()

    def _abandon(self, route: WeightRoute) -> None:
        link = self._links.pop(route.transport, None)
        if link is not None:
            link.abandon()


# --- on the link's thread


def _take(
    link: Link, manifest: WeightManifest, route: WeightRoute, inbox: Inbox, host: str
) -> None:
    """Take part in rounds until everything has been handed over."""
    deadline = Deadline(route.timeout_s + GRACE_S)
    broke = ""
    for number in count(1):
        try:
            ready = Ready(route.rank, link.holds, inbox.has, host=host)
            announce(link, route, number, ready, deadline)
            if inbox.has > len(manifest.bucket_bytes):
                link.reader.finish(inbox, deadline)
                return
            go = wait_for_go(link, route, number, deadline)
        except TransferFailed as error:
            if not broke:
                raise
            msg = f"version {manifest.version} was lost on its way here ({broke}): {error}"
            raise TransferFailed(msg) from None
        try:
            _receive_round(link, manifest, route, inbox, go, deadline)
        except TransferFailed as error:
            broke = str(error)
            link.leave()
            if isinstance(error, EngineStuck) or link.is_abandoned:
                with contextlib.suppress(TransferFailed):  # the trainer may be gone as well
                    ready = Ready(route.rank, None, inbox.has, failure=broke)
                    announce(link, route, number + 1, ready, deadline)
                raise TransferFailed(broke) from None


def _receive_round(
    link: Link,
    manifest: WeightManifest,
    route: WeightRoute,
    inbox: Inbox,
    go: Go,
    deadline: Deadline,
) -> None:
    if go.shared is not None:
        _receive_shared(link, go.shared, manifest, route, inbox, deadline)
        return
    limit_s = patience_s(route.timeout_s)
    assert go.group is not None  # noqa: S101 - else `wait_for_go` has raised
    limit = deadline.within(limit_s)
    group = link.enter(go.group, route.backend, go.rank, go.size, limit)
    large = large_bytes(route.world_size)
    receive_round(link, group, manifest, inbox, go.first, deadline, limit_s, large)


def _receive_shared(
    link: Link,
    address: str,
    manifest: WeightManifest,
    route: WeightRoute,
    inbox: Inbox,
    deadline: Deadline,
) -> None:
    """Take everything at once: what was lost hold of may have been overwritten."""
    try:
        link.reader.knock(address, route.group, route.rank, deadline)
        staging = link.staging(inbox.staging, _HOST) if inbox.is_whole else None
        link.reader.receive(manifest, inbox, staging, deadline, link.check)
    except (OSError, TransferFailed) as error:
        link.reader.leave()
        raise EngineStuck(str(error)) from None
