"""Weights by broadcast from the trainer to all engines at once: both ends.

The sender consumes the trainer's parameters, the receiver produces a loaded engine. They wait for
each other, at the transfer's store and in its process group, for `timeout_s` in all and no longer;
a lost member, an abort or a cancellation unblocks them before that. Buckets travel one after
another, and the trailer with their digests behind them: while one bucket travels, the sender
gathers the next, and the receiver writes the one before.

`WeightSource.read` is called on the sender's own thread, not on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid  # noqa: TID251 - real groups only, and an engine may hold one of an earlier trainer
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Final, NamedTuple

from ratchet.config import WeightsConfig
from ratchet.errors import ConfigError, TransferFailed, WeightsMismatch
from ratchet.transport.weights.base import LoadReport, SendReport, WeightSink, WeightSource
from ratchet.transport.weights.finalize import finalize
from ratchet.transport.weights.groups import (
    Deadline,
    Group,
    check_backend,
    choose_backend,
    serve_store,
)
from ratchet.transport.weights.inbox import Inbox
from ratchet.transport.weights.link import Link
from ratchet.transport.weights.meeting import (
    Answers,
    Go,
    Ready,
    announce,
    gather_ready,
    wait_for_go,
)
from ratchet.transport.weights.plan import check_specs, make_manifest, slots_by_bucket
from ratchet.transport.weights.registry import Transport
from ratchet.transport.weights.scope import LoadScope
from ratchet.transport.weights.stream import receive_buckets, send_buckets
from ratchet.types import PauseMode, PolicyVersion, Term, WeightManifest, WeightRoute

_GRACE_S: Final = 1.0
"""Who waits for another that has the same deadline waits so much longer: the event loop for its
thread, an engine for the trainer, so that the one who knows says what went wrong.
"""


class _Transfer(NamedTuple):
    """A planned transfer."""

    manifest: WeightManifest
    name: str
    """of its meeting point in the store, and of its group if it gets a new one"""
    backend: str
    engines: tuple[str, ...]
    """by rank, from rank 1"""


class BroadcastSender:
    """The trainer's end, rank 0. One transfer at a time."""

    def __init__(self, config: WeightsConfig, host: str, source: WeightSource) -> None:
        try:
            check_backend(config.backend)
        except TransferFailed as error:
            msg = f"weights.backend = {config.backend!r}: {error}"
            raise ConfigError(msg) from None
        self._config = config
        self._source = source
        self._store, self._host, self._port = serve_store(host)
        self._names = (f"{uuid.uuid4().hex[:8]}-{number}" for number in count(1))
        self._planned: _Transfer | None = None
        self._link = self._new_link()
        self._members: tuple[str, ...] = ()
        """engines of the group that the link holds"""
        self._answers = Answers(config.timeout_s + 2 * _GRACE_S)

    def plan(
        self,
        term: Term,
        version: PolicyVersion,
        step: int,
        engines: Sequence[str],
        *,
        catch_up: bool = False,
    ) -> tuple[WeightManifest, Mapping[str, WeightRoute]]:
        """Plan one transfer; a plan that was not sent is forgotten.

        Raises:
            TransferFailed: if there is no engine.
        """
        if not engines:
            msg = f"there is no engine to send version {version} to"
            raise TransferFailed(msg)
        bucket_bytes = int(self._config.bucket_mib * 2**20)
        manifest = make_manifest(
            self._source.specs(), bucket_bytes, term=term, version=version, step=step
        )
        backend = choose_backend(self._config.backend, len(engines))
        self._planned = _Transfer(manifest, next(self._names), backend, tuple(engines))
        routes = {
            engine: WeightRoute(
                transport="broadcast",
                backend=backend,
                host=self._host,
                port=self._port,
                group=self._planned.name,
                rank=rank,
                world_size=len(engines) + 1,
                timeout_s=self._config.timeout_s,
            )
            for rank, engine in enumerate(engines, 1)
        }
        return manifest, routes

    async def send(self, manifest: WeightManifest) -> SendReport:
        """Send the planned transfer. Cancelling gives it up.

        Raises:
            TransferFailed: if an engine did not come, could not take part, or was lost.
        """
        transfer, self._planned = self._planned, None
        if transfer is None or transfer.manifest is not manifest:
            msg = f"version {manifest.version} is not what was planned last"
            raise RuntimeError(msg)
        deadline = Deadline(self._config.timeout_s)
        link = self._link
        scope = asyncio.timeout(deadline.left_s + _GRACE_S)
        sent = False
        try:
            async with scope:
                report = await link.run(lambda: self._send(link, transfer, deadline))
            sent = True
        except TimeoutError:
            if not scope.expired():
                raise
            msg = (
                f"sending version {manifest.version} took longer than {deadline.timeout_s:g} s:"
                " the trainer's parameters could not be read in time"
            )
            raise TransferFailed(msg) from None
        finally:
            if not sent:  # its thread may be stuck
                link.abandon()
                self._link = self._new_link()
        return report

    def leave(self, engine: str, reason: str) -> None:
        """Wait for this engine no longer."""

    async def close(self) -> None:
        """Give up the group and the store."""
        await self._link.close(_GRACE_S)
        del self._store

    def _new_link(self) -> Link:
        return Link(self._host, self._port, "ratchet-weights-send")

    # --- on the link's thread

    def _send(self, link: Link, transfer: _Transfer, deadline: Deadline) -> SendReport:
        group = self._meet(link, transfer, deadline)
        try:
            return send_buckets(link, group, transfer.manifest, self._source, deadline)
        except TransferFailed as error:
            engines = ", ".join(transfer.engines)
            msg = f"version {transfer.manifest.version} was lost on its way to {engines}: {error}"
            raise TransferFailed(msg) from None

    def _meet(self, link: Link, transfer: _Transfer, deadline: Deadline) -> Group:
        """Wait for all engines, and enter a group with them: the last one if all still hold it."""
        store = link.store(deadline)
        try:
            held = gather_ready(link, transfer.name, transfer.engines, deadline)
            link.check()
        except TransferFailed as error:
            self._answers.give(store, transfer.name, Go(None, str(error)))
            raise
        kept = self._members == transfer.engines and held == {link.holds}
        name = link.holds if kept and link.holds else transfer.name
        self._members = transfer.engines
        self._answers.give(store, transfer.name, Go(name))
        return link.enter(name, transfer.backend, 0, len(transfer.engines) + 1, deadline)


class BroadcastReceiver:
    """An engine's end. One transfer at a time."""

    def __init__(self, config: WeightsConfig) -> None:
        self._config = config
        self._link: Link | None = None
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
        self._scope = LoadScope(route.timeout_s + _GRACE_S, late)
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
        """Leave the group."""
        self.abort("the engine closes")
        link, self._link = self._link, None
        if link is not None:
            await link.close(_GRACE_S)

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
            ready = Ready(route.rank, link.holds, str(error))
            with contextlib.suppress(TransferFailed):
                await link.run(lambda: announce(link, route, ready, Deadline(route.timeout_s)))
            raise
        inbox = Inbox(slots_by_bucket(manifest), each=self._config.verify)
        taken = link.run(lambda: _take(link, manifest, route, inbox))
        taken.add_done_callback(inbox.ended)
        try:
            return await finalize(
                manifest, owners, inbox, sink, mode, verify=self._config.verify, commit=commit
            )
        except (TransferFailed, asyncio.CancelledError):
            self._link = None
            taken.cancel()
            link.abandon()
            raise
        finally:
            # where the engine failed, the rest is received all the same: the others go on
            inbox.drain()

    def _connect(self, route: WeightRoute) -> Link:
        """Return the link to the trainer of this route, a new one if it is another trainer."""
        link = self._link
        if link is None or (link.host, link.port) != (route.host, route.port):
            if link is not None:
                link.abandon()
            link = self._link = Link(route.host, route.port, "ratchet-weights-receive")
        return link


def transport() -> Transport:
    """Return both ends."""
    return Transport(BroadcastSender, BroadcastReceiver)


# --- on the receiving link's thread


def _take(link: Link, manifest: WeightManifest, route: WeightRoute, inbox: Inbox) -> None:
    """Join the transfer and hand over what arrives."""
    deadline = Deadline(route.timeout_s + _GRACE_S)
    announce(link, route, Ready(route.rank, link.holds), deadline)
    name = wait_for_go(link, route, deadline)
    try:
        group = link.enter(name, route.backend, route.rank, route.world_size, deadline)
        receive_buckets(link, group, manifest, inbox, deadline)
    except TransferFailed as error:
        msg = f"version {manifest.version} was lost on its way here: {error}"
        raise TransferFailed(msg) from None
