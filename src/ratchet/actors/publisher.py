"""How the trainer publishes a version: reserve, transfer, commit or burn.

Consumes the registry's numbers and the engines' replies to `LoadWeights`; produces a live version
or a burnt number. Waits for the registry (ask deadline) and for the transfer (`weights.timeout_s`);
a lost engine ends its own wait, and nobody else's.

The weights must not change while a transfer reads them: `Publisher.weights` is the lock that a
transfer and an optimiser step both take. Training goes on during a transfer, up to the next
optimiser step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

from ratchet.actors.role import REGISTRY
from ratchet.errors import (
    ActorDead,
    HandlerFailed,
    RatchetError,
    StaleTerm,
    TransferFailed,
    VersionError,
)
from ratchet.messages import (
    AbortLoad,
    Ask,
    BurnVersion,
    CommitVersion,
    LoadWeights,
    ReserveVersion,
    VersionReserved,
    WeightsLoaded,
)
from ratchet.observability.logs import Log
from ratchet.staleness import Lineage, Position
from ratchet.transport.mailbox.base import Directory, Ref
from ratchet.transport.weights.base import SendReport, WeightSender
from ratchet.types import PolicyVersion, RoleInfo, Term, VersionRecord, WeightManifest

R = TypeVar("R")

_REASON_S: Final = 5.0
"""An engine's reply may come this much later than the transfer's deadline: it says why."""

_ABSENT: Final = (ActorDead, StaleTerm, VersionError, HandlerFailed)
"""How an ask to load ends when the engine has not joined the transfer, and will not."""

Replies: TypeAlias = dict[str, WeightsLoaded | RatchetError]


class AskFunction(Protocol):
    """`Actor.ask`: registers the wait, and always has a deadline."""

    def __call__(self, ref: Ref, message: Ask[R], *, timeout: float | None = None) -> Awaitable[R]:
        """Ask and await the reply."""
        ...


class Published(NamedTuple):
    """How one transfer ended."""

    version: PolicyVersion
    loaded: tuple[str, ...]
    """names of the engines that hold it, verified"""
    failed: tuple[RoleInfo, ...]
    seconds: float


class Publisher:
    """The trainer's side of weight sync, one transfer at a time."""

    def __init__(
        self,
        *,
        sender: WeightSender,
        directory: Directory,
        ask: AskFunction,
        now: Callable[[], float],
        timeout_s: float,
        log: Log,
    ) -> None:
        self.weights = asyncio.Lock()
        self._settled = asyncio.Condition(self.weights)
        self._undecided = True  # the weights in hand have not been offered yet
        self.term: Term = 0
        self.lineage = Lineage()
        self.version: PolicyVersion | None = None
        """The number of the weights in hand; None before the first is reserved."""
        self.live: PolicyVersion | None = None
        """The version of the weights in hand, if it is live."""
        self.holders: dict[str, RoleInfo] = {}
        """The engines that hold the live version."""
        self._base: PolicyVersion | None = None
        self._rollouts: tuple[RoleInfo, ...] = ()
        self._sender = sender
        self._directory = directory
        self._ask = ask
        self._now = now
        self._timeout_s = timeout_s
        self._log = log

    def begin(self, term: Term, versions: Iterable[VersionRecord]) -> None:
        """Publish under this term, and know every version so far.

        A trainer starts from the base model. If an earlier one has published that already, what
        follows descends from it: tokens of the earlier trainer are then as stale as the steps back
        to the base, and never of a tree of their own.
        """
        known = tuple(versions)
        self.term = term
        self.lineage = Lineage(known)
        self._base = min((r.version for r in known if r.parent is None), default=None)

    @property
    def position(self) -> Position:
        """The weights in hand: their number, and their optimiser step."""
        if self.version is None:
            msg = "the trainer has not reserved a version yet"
            raise RuntimeError(msg)
        return Position(self.version, self.lineage.step(self.version))

    async def reserve(self, step: int) -> None:
        """Give the weights in hand a number of their own; the caller holds the lock.

        From here on a token of this version may be judged, and the trainer's own position is this
        version, whether it will be live or burnt: a burnt number names weights that nobody got, and
        the next version still descends from them.

        Raises:
            StaleTerm: if another trainer has taken over.
        """
        self.live = None
        self.holders = {}
        self._undecided = True
        parent = self._base if self.version is None else self.version
        reserved: VersionReserved = await self._ask(
            self._directory.ref(REGISTRY), ReserveVersion(self.term, step, parent)
        )
        self.lineage.add(reserved.version, step, parent)
        self.version = reserved.version
        self._rollouts = reserved.rollouts

    async def transfer(self) -> Published:
        """Offer the version just reserved to every engine, and make it live or burn it.

        Raises:
            StaleTerm: if another trainer has taken over.
        """
        async with self.weights:
            return await self._offer()

    async def publish_again(self) -> Published:
        """Offer the weights in hand under a new number, if nobody holds them under the old one."""
        async with self._settled:
            await self._until_decided()
            if self.live is not None:  # an optimiser step came first, and its version arrived
                return Published(self.live, tuple(self.holders), (), 0.0)
            await self.reserve(self.position.step)
            return await self._offer()

    async def _offer(self) -> Published:
        started = self._now()
        registry = self._directory.ref(REGISTRY)
        version, step = self.position
        replies = await self._transfer(version, step, self._rollouts)
        loaded = [reply for reply in replies.values() if isinstance(reply, WeightsLoaded)]
        if loaded:
            await self._ask(registry, CommitVersion(self.term, version, loaded[0].digest))
            self.live = version
            self.holders = {e.name: e for e in self._rollouts if self._holds(e, replies)}
        else:
            reason = "; ".join(str(reply) for reply in replies.values()) or "no engine is alive"
            await self._ask(registry, BurnVersion(self.term, version, reason))
        self._undecided = False
        self._settled.notify_all()
        return self._report(version, self._rollouts, replies, self._now() - started)

    async def catch_up(self, engine: RoleInfo) -> Published | None:
        """Bring one engine to the live version; None if the weights in hand have none.

        A version that is reserved but not offered yet is waited for: an engine that came between
        the two is not among those that it will be offered to.
        """
        async with self._settled:
            await self._until_decided()
            if self.live is None:
                return None
            started = self._now()
            version = self.live
            if self.holders.get(engine.name) == engine:
                return Published(version, (engine.name,), (), 0.0)
            replies = await self._transfer(version, self.lineage.step(version), (engine,))
            if self._holds(engine, replies):
                self.holders[engine.name] = engine
            return self._report(version, (engine,), replies, self._now() - started)

    async def _until_decided(self) -> None:
        await self._settled.wait_for(lambda: not self._undecided)

    async def _transfer(
        self, version: PolicyVersion, step: int, engines: Sequence[RoleInfo]
    ) -> Replies:
        if not engines:
            return {}
        names = {engine.name: f"{engine.name}/{engine.incarnation}" for engine in engines}
        manifest, routes = self._sender.plan(self.term, version, step, list(names.values()))
        loads = {
            name: asyncio.ensure_future(
                self._ask(
                    self._directory.ref(name),
                    LoadWeights(manifest, routes[full_name]),
                    timeout=self._timeout_s + _REASON_S,
                )
            )
            for name, full_name in names.items()
        }
        try:
            sent: SendReport | None = await self._send(manifest, loads.values())
        except TransferFailed as error:
            sent = None
            self._log.warning("transfer_failed", version=version, detail=str(error))
            for name in loads:  # the survivors would wait for their whole timeout
                self._directory.ref(name).tell(AbortLoad(self.term, version, str(error)))
        except BaseException:  # the trainer's own weights could not be read, or it is stopped
            for load in loads.values():
                load.cancel()
            await asyncio.gather(*loads.values(), return_exceptions=True)
            raise
        outcomes = await asyncio.gather(*loads.values(), return_exceptions=True)
        replies = {
            name: self._checked(name, version, outcome, sent)
            for name, outcome in zip(loads, outcomes, strict=True)
        }
        if sent is not None:
            self._log.info("weights_sent", version=version, **sent._asdict())
        return replies

    async def _send(
        self, manifest: WeightManifest, loads: Iterable[asyncio.Future[WeightsLoaded]]
    ) -> SendReport:
        """Send; end early when an engine is gone or refuses, for then it never joins."""
        sending = asyncio.ensure_future(self._sender.send(manifest))
        pending: set[asyncio.Future[Any]] = {sending, *loads}
        try:
            while not sending.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                absent = [e for d in done - {sending} if isinstance(e := d.exception(), _ABSENT)]
                if absent and not sending.done():
                    msg = f"an engine does not join: {absent[0]}"
                    raise TransferFailed(msg)
            return sending.result()
        finally:
            if not sending.done():
                sending.cancel()
                await asyncio.wait([sending])

    def _checked(
        self,
        name: str,
        version: PolicyVersion,
        outcome: WeightsLoaded | BaseException,
        sent: SendReport | None,
    ) -> WeightsLoaded | RatchetError:
        if isinstance(outcome, WeightsLoaded):
            if sent is None or outcome.digest == sent.digest:
                return outcome
            outcome = TransferFailed(
                f"{name} holds digest {outcome.digest}, the trainer sent {sent.digest}"
            )
        if isinstance(outcome, StaleTerm) or not isinstance(outcome, RatchetError):
            raise outcome
        self._log.warning("engine_failed", engine=name, version=version, detail=str(outcome))
        return outcome

    @staticmethod
    def _holds(engine: RoleInfo, replies: Replies) -> bool:
        return isinstance(replies.get(engine.name), WeightsLoaded)

    def _report(
        self,
        version: PolicyVersion,
        engines: Sequence[RoleInfo],
        replies: Replies,
        seconds: float,
    ) -> Published:
        return Published(
            version,
            loaded=tuple(engine.name for engine in engines if self._holds(engine, replies)),
            failed=tuple(engine for engine in engines if not self._holds(engine, replies)),
            seconds=seconds,
        )
