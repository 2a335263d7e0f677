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
import uuid
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from time import perf_counter
from typing import Final, NamedTuple

import torch

from ratchet.config import WeightsConfig
from ratchet.errors import TransferFailed, WeightsMismatch
from ratchet.transport.weights.base import LoadReport, SendReport, WeightSink, WeightSource
from ratchet.transport.weights.buckets import host_bytes, pack
from ratchet.transport.weights.digest import digest_of, make_trailer, trailer_bytes, whole_digest
from ratchet.transport.weights.finalize import finalize
from ratchet.transport.weights.groups import Deadline, Group, choose_backend, serve_store
from ratchet.transport.weights.inbox import Inbox
from ratchet.transport.weights.link import Link
from ratchet.transport.weights.meeting import (
    Go,
    Ready,
    announce,
    answer,
    forget,
    gather_ready,
    wait_for_go,
)
from ratchet.transport.weights.plan import check_specs, make_manifest, slots_by_bucket
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
        self._config = config
        self._source = source
        self._store, self._host, self._port = serve_store(host)
        self._names = (f"{uuid.uuid4().hex[:8]}-{number}" for number in count(1))
        self._planned: _Transfer | None = None
        self._link = self._new_link()
        self._members: tuple[str, ...] = ()
        """engines of the group that the link holds"""
        self._answered: str | None = None
        """the last transfer that got its answer"""

    def plan(
        self, term: Term, version: PolicyVersion, step: int, engines: Sequence[str]
    ) -> tuple[WeightManifest, Mapping[str, WeightRoute]]:
        """Plan one transfer; a plan that was not sent is forgotten.

        Raises:
            TransferFailed: if there is no engine, or the configured backend cannot be had.
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

    async def close(self) -> None:
        """Give up the group and the store."""
        await self._link.close(_GRACE_S)
        del self._store

    def _new_link(self) -> Link:
        return Link(self._host, self._port, "ratchet-weights-send")

    # --- on the link's thread

    def _send(self, link: Link, transfer: _Transfer, deadline: Deadline) -> SendReport:
        group = self._meet(link, transfer, deadline)
        manifest = transfer.manifest
        staging = link.staging(max(manifest.bucket_bytes, default=0))
        digests: list[bytes] = []
        gather_s = move_s = 0.0
        wait: Callable[[], None] = _nothing
        for index, slots in enumerate(slots_by_bucket(manifest)):
            start = perf_counter()
            bucket = staging[index % len(staging)][: manifest.bucket_bytes[index]]
            pack(bucket, slots, self._source.read([slot.name for slot in slots]))
            digests.append(digest_of(host_bytes(bucket)))
            gathered = perf_counter()
            wait()
            wait = group.broadcast(bucket, deadline)
            gather_s += gathered - start
            move_s += perf_counter() - gathered
        start = perf_counter()
        wait()
        trailer = group.allocate(trailer_bytes(manifest))
        data = bytearray(make_trailer(manifest, digests))
        trailer.copy_(torch.frombuffer(data, dtype=torch.uint8))
        group.broadcast(trailer, deadline)()
        return SendReport(
            digest=whole_digest(digests),
            num_bytes=sum(manifest.bucket_bytes),
            num_buckets=len(digests),
            gather_s=gather_s,
            move_s=move_s + perf_counter() - start,
        )

    def _meet(self, link: Link, transfer: _Transfer, deadline: Deadline) -> Group:
        """Wait for all engines, and enter a group with them: the last one if all still hold it."""
        store = link.store(deadline)
        try:
            held = gather_ready(link, transfer.name, transfer.engines, deadline)
        except TransferFailed as error:
            answer(store, transfer.name, Go(None, str(error)))
            raise
        kept = self._members == transfer.engines and held == {link.holds}
        name = link.holds if kept and link.holds else transfer.name
        if self._answered:  # all engines have read it, or they would not be here
            forget(store, self._answered)
        self._members, self._answered = transfer.engines, transfer.name
        answer(store, transfer.name, Go(name))
        return link.enter(name, transfer.backend, 0, len(transfer.engines) + 1, deadline)


class BroadcastReceiver:
    """An engine's end. One transfer at a time."""

    def __init__(self, config: WeightsConfig) -> None:
        self._config = config
        self._link: Link | None = None
        self._scope: asyncio.Timeout | None = None
        """of the pending `receive`, until it commits"""
        self._reason: str | None = None

    async def receive(
        self, manifest: WeightManifest, route: WeightRoute, sink: WeightSink, mode: PauseMode
    ) -> LoadReport:
        """Take a version into the sink."""
        if self._scope is not None:
            msg = "this engine is still receiving an earlier version; abort that first"
            raise TransferFailed(msg)
        scope = self._scope = asyncio.timeout(route.timeout_s + _GRACE_S)
        self._reason = None
        try:
            async with scope:
                return await self._receive(manifest, route, sink, mode)
        except TimeoutError:
            if not scope.expired():
                raise
            raise TransferFailed(self._why(manifest, route)) from None
        finally:
            self._scope = None

    def abort(self, reason: str) -> None:
        """End a pending `receive`, unless it has begun to stamp the version. The first reason
        counts.
        """
        if self._scope is not None and self._reason is None and not self._scope.expired():
            self._reason = reason
            self._scope.reschedule(0.0)

    async def close(self) -> None:
        """Leave the group."""
        self.abort("the engine closes")
        link, self._link = self._link, None
        if link is not None:
            await link.close(_GRACE_S)

    def _why(self, manifest: WeightManifest, route: WeightRoute) -> str:
        late = f"version {manifest.version} was not loaded within {route.timeout_s:g} s"
        return self._reason or late

    def _commit(self) -> None:
        if self._reason is not None:
            raise TransferFailed(self._reason)
        if self._scope is not None:
            self._scope.reschedule(None)
            self._scope = None

    async def _receive(
        self, manifest: WeightManifest, route: WeightRoute, sink: WeightSink, mode: PauseMode
    ) -> LoadReport:
        link = self._connect(route)
        try:
            owners = check_specs(manifest, sink.specs())
        except WeightsMismatch as error:
            ready = Ready(route.rank, link.holds, str(error))
            with contextlib.suppress(TransferFailed):
                await link.run(lambda: announce(link, route, ready, Deadline(route.timeout_s)))
            raise
        inbox = Inbox(slots_by_bucket(manifest), each=self._config.verify)
        taken = link.run(lambda: _take(link, manifest, route, inbox))
        taken.add_done_callback(inbox.ended)
        try:
            return await finalize(
                manifest, owners, inbox, sink, mode, verify=self._config.verify, commit=self._commit
            )
        except (TransferFailed, asyncio.CancelledError):
            self._link = None
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


# --- on the receiving link's thread


def _take(link: Link, manifest: WeightManifest, route: WeightRoute, inbox: Inbox) -> None:
    """Join the transfer and hand over what arrives."""
    deadline = Deadline(route.timeout_s + _GRACE_S)
    announce(link, route, Ready(route.rank, link.holds), deadline)
    name = wait_for_go(link, route, deadline)
    group = link.enter(name, route.backend, route.rank, route.world_size, deadline)
    staging = link.staging(max(manifest.bucket_bytes, default=0))
    for index, size in enumerate(manifest.bucket_bytes):
        inbox.wait_for_room(deadline)
        bucket = staging[index % len(staging)][:size]
        group.broadcast(bucket, deadline)()
        inbox.put_bucket(index, bucket)
    trailer = group.allocate(trailer_bytes(manifest))
    group.broadcast(trailer, deadline)()
    inbox.put(bytes(host_bytes(trailer)))


def _nothing() -> None:
    pass
