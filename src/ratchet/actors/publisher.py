"""How the trainer publishes a version: reserve, transfer, commit or burn.

Consumes the registry's numbers and the engines' answers; produces a live version or a burnt number.
Waits for the registry (ask deadline) and for a transfer (`transfer.py`: `weights.timeout_s`).

The weights must not change while they are read. Without a snapshot a transfer holds them all the
while, and the next optimiser step waits for its end. With one (`weights.snapshot`) a transfer reads
a copy, taken as its version is published, and the step waits for the copy alone; then steps may be
faster than transfers: one version travels, the newest waits, and a number that is overtaken while
it waits is burnt.

An engine that comes late, or was lost, catches up point to point. That gives way to all else: a
step that changes the weights it reads, or a transfer to all, ends it at once. Its engine is among
those that the newer version is offered to, and is offered it again if that fails too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol, TypeVar

from ratchet.actors.pins import NoPins, Pins
from ratchet.actors.right_of_way import RightOfWay
from ratchet.actors.role import REGISTRY
from ratchet.actors.step_metrics import sync_metrics
from ratchet.actors.transfer import AskFunction, Transferred, Transfers
from ratchet.messages import Ask, BurnVersion, CommitVersion, ReserveVersion, VersionReserved
from ratchet.observability.logs import Log
from ratchet.staleness import Lineage, Position
from ratchet.transport.mailbox.base import Directory
from ratchet.types import PolicyVersion, RoleInfo, Term, VersionRecord, WeightProbe

R = TypeVar("R")


class WeightSnapshot(Protocol):
    """Copies of the trainer's weights, which the sender reads in their place. Two at most: the
    newest, and one that is being read.
    """

    async def take(self, version: PolicyVersion) -> None:
        """Copy the weights as they are now; they must not change meanwhile. The copy of an older
        version that nobody reads is overwritten.
        """
        ...

    def reading(self, version: PolicyVersion) -> AbstractContextManager[None]:
        """Give the sender this version, the newest taken, as long as the context lasts."""
        ...


class ProbeFunction(Protocol):
    """`TrainingBackend.probe`."""

    def __call__(self, seed: int) -> Awaitable[WeightProbe | None]: ...  # noqa: D102


class Published(NamedTuple):
    """How one transfer ended."""

    version: PolicyVersion
    loaded: tuple[str, ...] = ()
    """names of the engines that hold it, verified"""
    failed: tuple[RoleInfo, ...] = ()
    """engines to offer the live version to again"""
    seconds: float = 0.0
    metrics: dict[str, float | None] = {}
    """of the sync, for the line of the step; empty where nothing was sent"""


class _Offer(NamedTuple):
    """A reserved number, and whom its weights are for."""

    version: PolicyVersion
    step: int
    engines: tuple[RoleInfo, ...]
    probe: WeightProbe | None


class Publisher:
    """The trainer's side of weight sync, one transfer at a time."""

    def __init__(
        self,
        transfers: Transfers,
        *,
        directory: Directory,
        ask: AskFunction,
        now: Callable[[], float],
        log: Log,
        snapshot: WeightSnapshot | None = None,
        probe: ProbeFunction | None = None,
    ) -> None:
        self.term: Term = 0
        self.lineage = Lineage()
        self.live: PolicyVersion | None = None
        """The version of the weights in hand, if it is live."""
        self.holders: dict[str, RoleInfo] = {}
        """The engines that hold the live version."""
        self.snapshot = snapshot
        self._probe = probe
        self.pins: Pins = NoPins()
        self._base: PolicyVersion | None = None
        self._offer: _Offer | None = None
        """the weights in hand"""
        self._reserving = False
        """they have changed, and have no number yet"""
        self._decided = asyncio.Event()  # the weights in hand are live, or their number is burnt
        self._weights = RightOfWay()  # to change the weights, and to read them
        self._sending = self._weights if snapshot is None else RightOfWay()
        self._transfers = transfers
        self._directory = directory
        self._ask = ask
        self._now = now
        self._log = log

    def begin(
        self, term: Term, versions: Iterable[VersionRecord], base: PolicyVersion | None = None
    ) -> None:
        """Publish under this term, and know every version so far.

        What follows descends from `base`, the version of a checkpoint; by default from the last
        number of the base model, if there is one (the answers with those before it were lost).
        Tokens of an earlier trainer are then as stale as the steps back to there and on.
        """
        known = tuple(versions)
        self.term = term
        self.lineage = Lineage(known)
        if base is None:
            base = max((r.version for r in known if r.parent is None), default=None)
        self._base = base

    @property
    def version(self) -> PolicyVersion | None:
        """The number of the weights in hand; None before the first is reserved."""
        return None if self._offer is None else self._offer.version

    @property
    def position(self) -> Position:
        """The weights in hand: their number, and their optimiser step."""
        if self._offer is None:
            msg = "the trainer has not reserved a version yet"
            raise RuntimeError(msg)
        return Position(self._offer.version, self._offer.step)

    def changing(self) -> AbstractAsyncContextManager[None]:
        """Hold the weights: to change them, and to `reserve` their number before anyone else can
        read them.
        """
        return self._weights.first("the trainer takes the next optimiser step")

    async def reserve(self, step: int) -> None:
        """Give the weights in hand a number of their own; the caller holds them.

        From here on a token of this version may be judged, and the trainer's own position is this
        version, whether it will be live or burnt: a burnt number names weights that nobody got, and
        the next version still descends from them.

        Raises:
            StaleTerm: if another trainer has taken over.
        """
        self.live = None
        self.holders = {}
        self._decided.clear()
        parent = self._base if self.version is None else self.version
        self._reserving = True
        probe = None if self._probe is None else await self._probe(step)
        reserved: VersionReserved = await self._ask_registry(
            ReserveVersion(self.term, step, parent)
        )
        self._reserving = False
        self.lineage.add(reserved.version, step, parent)
        self._offer = _Offer(reserved.version, step, reserved.rollouts, probe)

    def transfer(self) -> Awaitable[Published]:
        """Offer the version just reserved to every engine, and make it live or burn it.

        Raises:
            RuntimeError: if there is none.
            StaleTerm: from the result, if another trainer has taken over.
        """
        if self._offer is None:
            msg = "the trainer has not reserved a version yet"
            raise RuntimeError(msg)
        return self._transfer(self._offer)

    async def publish_again(self) -> Published:
        """Offer the weights in hand under a new number, if nobody holds them under the old one."""
        while True:
            await self._decided.wait()
            async with self.changing():
                if self.live is not None:
                    return Published(self.live, tuple(self.holders))
                if self._decided.is_set():
                    await self.reserve(self.position.step)
                    break
        return await self.transfer()

    async def catch_up(self, engine: RoleInfo) -> Published | None:
        """Bring one engine to the live version; None if the weights in hand have none.

        A version that is reserved but not offered yet is waited for: an engine that came between
        the two is not among those that it will be offered to. A version that is reserved while this
        goes on ends it, and the engine counts as failed.
        """
        while True:
            await self._decided.wait()
            async with self._sending.last() as cut:
                if not self._decided.is_set():
                    continue
                if self.live is None:
                    return None
                if self.holders.get(engine.name) == engine:
                    return Published(self.live, (engine.name,))
                if self.pins.pinned(engine):  # and offered it when it is so no more
                    return Published(self.live)
                return await self._catch_up(engine, self.live, cut)

    async def _transfer(self, offer: _Offer) -> Published:
        snapshot_s = 0.0
        if self.snapshot is not None:
            async with self._weights.first("the trainer copies its weights"):
                started = self._now()
                if offer is self._offer:
                    await self.snapshot.take(offer.version)
                snapshot_s = self._now() - started
        async with self._sending.first(f"version {self.version} goes to every engine"):
            if offer is self._offer:
                return await self._publish(offer, snapshot_s)
            reason = f"overtaken by version {self.version} before its transfer"
            await self._ask_registry(BurnVersion(self.term, offer.version, reason))
            return Published(offer.version)

    async def _publish(self, offer: _Offer, snapshot_s: float) -> Published:
        started = self._now()
        version, step, offered, probe = offer
        engines = [engine for engine in offered if not self.pins.pinned(engine)]
        with self._reading(version):
            done = await self._transfers.run(self.term, version, step, engines, probe=probe)
        if done.loaded:
            digest = next(iter(done.loaded.values())).digest
            await self._ask_registry(CommitVersion(self.term, version, digest))
            self.pins.live(version, tuple(done.loaded))
        else:
            nobody = "every engine evaluates" if offered else "no engine is alive"
            reason = "; ".join(done.failed.values()) or nobody
            await self._ask_registry(BurnVersion(self.term, version, reason))
        if offer is self._offer and not self._reserving:  # else a step was taken meanwhile
            if done.loaded:
                self.live = version
                self.holders = {engine.name: engine for engine in done.loaded}
            self._decided.set()
        return self._report("weights_published", done, self._now() - started, snapshot_s)

    async def _catch_up(
        self, engine: RoleInfo, version: PolicyVersion, cut: asyncio.Future[str]
    ) -> Published:
        step = self.lineage.step(version)
        probe = None if self._offer is None else self._offer.probe
        with self._reading(version):
            done = await self._transfers.run(
                self.term, version, step, (engine,), probe=probe, cut=cut
            )
        if self.live == version:
            self.holders |= {each.name: each for each in done.loaded}
        return self._report("weights_caught_up", done, done.seconds, 0.0)

    def _ask_registry(self, message: Ask[R]) -> Awaitable[R]:
        return self._ask(self._directory.ref(REGISTRY), message)

    def _reading(self, version: PolicyVersion) -> AbstractContextManager[None]:
        return nullcontext() if self.snapshot is None else self.snapshot.reading(version)

    def _report(
        self, event: str, done: Transferred, seconds: float, snapshot_s: float
    ) -> Published:
        if not done.loaded:
            return Published(done.version, (), tuple(done.failed), seconds)
        metrics = sync_metrics(done, snapshot_s)
        fields = {name.removeprefix("weights/"): value for name, value in metrics.items()}
        self._log.info(
            event,
            **fields,
            term=self.term,
            step=self.lineage.step(done.version),
            digest=next(iter(done.loaded.values())).digest,
            seconds=seconds,
            engines={
                engine.name: {"move_s": r.move_s, "load_s": r.load_s, "paused_s": r.paused_s}
                for engine, r in done.loaded.items()
            },
            failed={engine.name: detail for engine, detail in done.failed.items()},
            shared_memory=list(done.sent.shared) if done.sent else [],
            not_shared=done.sent.not_shared if done.sent else "",
        )
        loaded = tuple(engine.name for engine in done.loaded)
        return Published(done.version, loaded, tuple(done.failed), seconds, metrics)
