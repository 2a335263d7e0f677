"""The trainer's end of every transport: plans a transfer, divides its engines, and sends.

Consumes the trainer's parameters, produces a report. Waits for its lanes, each on the thread of its
own link, and for the thread that gathers, for `timeout_s` in all; a cancellation unblocks it at
once, and leaves threads that are stuck behind. An engine that is lost ends its own part, and the
lane of the others goes on.

`WeightSource.read` is called on the sender's own thread, not on the event loop.
"""

from __future__ import annotations

import asyncio
import uuid  # noqa: TID251 - real groups only, and an engine may hold one of an earlier trainer
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from ratchet.config import WeightsConfig
from ratchet.errors import ConfigError, TransferFailed
from ratchet.transport.weights.base import SendReport, WeightSource
from ratchet.transport.weights.deadline import Deadline
from ratchet.transport.weights.direct_lane import DirectLane
from ratchet.transport.weights.gathering import Gathering
from ratchet.transport.weights.groups import check_backend, choose_backend, device_of
from ratchet.transport.weights.lane import Lane, LanePlan
from ratchet.transport.weights.link import Link
from ratchet.transport.weights.meeting import GRACE_S, Answers
from ratchet.transport.weights.pieces import large_bytes
from ratchet.transport.weights.plan import make_manifest, slots_by_bucket
from ratchet.transport.weights.shared_door import SHARED
from ratchet.transport.weights.shared_lane import Neighbours, SharedLane
from ratchet.transport.weights.staging import NUM_STAGING, Staging
from ratchet.transport.weights.store import serve_store
from ratchet.transport.weights.worker import Worker
from ratchet.types import PolicyVersion, Term, WeightManifest, WeightRoute

if TYPE_CHECKING:
    import torch

Division: TypeAlias = Literal["broadcast", "p2p", "direct"]
"""All engines in one lane, or each in its own, which for "direct" leads to its servers."""

_TOGETHER: Final = ""
"""The lane of a broadcast, among those that are named after their engine."""


class _Transfer(NamedTuple):
    """A planned transfer."""

    manifest: WeightManifest
    backend: str
    lanes: Mapping[str, LanePlan]
    """by the key of their link"""
    catch_up: bool


class Sender:
    """Rank 0 of every group. One transfer at a time."""

    def __init__(
        self, division: Division, config: WeightsConfig, host: str, source: WeightSource
    ) -> None:
        try:
            check_backend(config.backend)
        except TransferFailed as error:
            msg = f"weights.backend = {config.backend!r}: {error}"
            raise ConfigError(msg) from None
        self._division: Division = division
        self._config = config
        self._source = source
        self._store, self._host, self._port = serve_store(host)
        self._names = (f"{uuid.uuid4().hex[:8]}-{number}" for number in count(1))
        self._planned: _Transfer | None = None
        self._most = 0
        """engines planned for at once: who catches up alone shares its devices with the others"""
        self._left: dict[str, str] = {}
        """engines that left the transfer, and why"""
        self._links: dict[str, Link] = {}
        self._neighbours = Neighbours(is_on=config.shared_memory and division != "direct")
        self._answers = Answers(config.timeout_s + 2 * GRACE_S)
        self._gatherer = Worker("ratchet-weights-gather")
        self._staging = Staging()

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
        division: Division = "p2p" if catch_up and not self._is_direct else self._division
        self._most = max(self._most, len(engines))
        backend = choose_backend(self._config.backend, self._most)
        local: tuple[str, ...] = ()
        if backend == "gloo" and not catch_up:  # NCCL moves from device to device
            local = self._neighbours.share(manifest, engines)
        remote = tuple(engine for engine in engines if engine not in local)
        keys: dict[str, tuple[str, ...]] = {SHARED: local}
        keys |= {_TOGETHER: remote} if division == "broadcast" else {e: (e,) for e in remote}
        lanes = {key: LanePlan(next(self._names), backend, e) for key, e in keys.items() if e}
        self._planned = _Transfer(manifest, backend, lanes, catch_up)
        self._left = {}
        return manifest, {
            engine: WeightRoute(
                transport=SHARED if key == SHARED else division,
                backend=backend,
                host=self._host,
                port=self._port,
                group=lane.point,
                rank=rank,
                world_size=len(lane.engines) + 1,
                timeout_s=self._config.timeout_s,
            )
            for key, lane in lanes.items()
            for rank, engine in enumerate(lane.engines, 1)
        }

    async def send(self, manifest: WeightManifest) -> SendReport:
        """Send the planned transfer. Cancelling gives it up.

        Raises:
            TransferFailed: if no engine got everything; the text says why, for each.
        """
        transfer, self._planned = self._planned, None
        if transfer is None or transfer.manifest is not manifest:
            msg = f"version {manifest.version} is not what was planned last"
            raise RuntimeError(msg)
        deadline = Deadline(self._config.timeout_s)
        gathering = self._gathering(transfer)
        kind = partial(DirectLane, slots_by_bucket(manifest)) if self._is_direct else Lane
        lanes = [
            (SharedLane if key == SHARED else kind)(
                plan, self._link(key, plan), gathering, self._answers, self._left, deadline
            )
            for key, plan in transfer.lanes.items()
        ]
        scope = asyncio.timeout(deadline.left_s + GRACE_S)
        start = asyncio.get_running_loop().time()
        done = False
        try:
            async with scope:
                served = [lane.link.run(lane.run) for lane in lanes]  # first: engines may be there
                await asyncio.gather(self._gatherer.run(gathering.run), *served)
            done = True
        except TimeoutError:
            if not scope.expired():
                raise
            msg = (
                f"sending version {manifest.version} took longer than {deadline.timeout_s:g} s:"
                " the trainer's parameters could not be read in time"
            )
            raise TransferFailed(msg) from None
        finally:
            if not done:
                self._abandon(gathering, transfer)
            self._keep_links(transfer)
        self._neighbours.note(lanes)
        report = _report(gathering, lanes, transfer, asyncio.get_running_loop().time() - start)
        return report._replace(not_shared=self._neighbours.failure)

    def leave(self, engine: str, reason: str) -> None:
        """Wait for this engine no longer. A bucket on its way to it is waited for all the same, as
        gloo cannot end that.
        """
        self._left.setdefault(engine, reason)

    async def close(self) -> None:
        """Give up the groups and the store."""
        links, self._links = self._links, {}
        await asyncio.gather(*(link.close(GRACE_S) for link in links.values()))
        self._neighbours.close()
        self._gatherer.stop(last=self._staging.free)
        del self._store

    def _gathering(self, transfer: _Transfer) -> Gathering:
        staging = [max(transfer.manifest.bucket_bytes)] * NUM_STAGING
        device = device_of(transfer.backend)
        points = [plan.point for plan in transfer.lanes.values()]
        allocate: Callable[[], Sequence[torch.Tensor]]
        allocate = partial(self._staging.buffers, staging, device)
        shares = SHARED in transfer.lanes
        if shares:
            self._staging.free()
            allocate = self._neighbours.slots
        in_place = not (shares or self._is_direct)  # else a bucket travels as a whole
        sizes = [len(plan.engines) + 1 for key, plan in transfer.lanes.items() if key != SHARED]
        large = large_bytes(max(sizes, default=0))
        return Gathering(
            transfer.manifest, self._source, allocate, points, large, in_place=in_place
        )

    @property
    def _is_direct(self) -> bool:
        return self._division == "direct"

    def _link(self, key: str, plan: LanePlan) -> Link:
        if key not in self._links:
            device = device_of(plan.backend)
            link = Link(self._host, self._port, "ratchet-weights-send", device)
            link.ring = self._neighbours.ring if key == SHARED else None
            self._links[key] = link
        return self._links[key]

    def _abandon(self, gathering: Gathering, transfer: _Transfer) -> None:
        """Leave threads that may be stuck behind, with what they use."""
        gathering.stop()
        for key in transfer.lanes:
            self._links.pop(key).abandon()
        if SHARED in transfer.lanes:
            self._neighbours.forget()
        self._gatherer.stop(last=self._staging.free)
        self._gatherer = Worker("ratchet-weights-gather")
        self._staging = Staging()

    def _keep_links(self, transfer: _Transfer) -> None:
        """Give up links that the next transfer will not use: one to a single engine of a broadcast,
        and others when a transfer went without them.
        """
        for key in list(self._links):
            single = key not in {_TOGETHER, SHARED}
            unused = key not in transfer.lanes and not transfer.catch_up
            if unused or (single and self._division == "broadcast"):
                self._links.pop(key).abandon()
                if key == SHARED:
                    self._neighbours.forget()


def _report(
    gathering: Gathering, lanes: Sequence[Lane], transfer: _Transfer, seconds: float
) -> SendReport:
    manifest = transfer.manifest
    engines = [engine for plan in transfer.lanes.values() for engine in plan.engines]
    reasons = {engine: reason for lane in lanes for engine, reason in lane.lost.items()}
    lost = {engine: reasons[engine] for engine in engines if engine in reasons}
    if len(lost) == len(engines):
        listed = "; ".join(f"{engine}: {reason}" for engine, reason in lost.items())
        msg = f"version {manifest.version} arrived nowhere: {listed}"
        raise TransferFailed(msg)
    return SendReport(
        digest=gathering.digest,
        num_bytes=sum(manifest.bucket_bytes),
        num_buckets=gathering.num_buckets,
        gather_s=gathering.gather_s,
        move_s=max(0.0, seconds - gathering.gather_s),
        lost=lost,
        shared=transfer.lanes[SHARED].engines if SHARED in transfer.lanes else (),
    )
