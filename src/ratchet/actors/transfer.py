"""One weight transfer, from the plan to the last engine's answer.

Consumes a version and the engines that it is for; produces a `Transferred`: what was sent, who
holds it, and why the others do not. Waits for the sender, which ends by `weights.timeout_s`, and
for the engines' replies to `LoadWeights`. A lost engine ends its own part and nobody else's: the
sender is told of an engine whose ask fails, and an engine that the sender has lost is told to stop
waiting. An older term than an engine has seen ends the whole transfer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypedDict, TypeVar

import msgspec

from ratchet.errors import RatchetError, StaleTerm, TransferFailed, WeightsMismatch
from ratchet.messages import AbortLoad, Ask, LoadWeights, WeightsLoaded
from ratchet.observability.logs import Log
from ratchet.transport.mailbox.base import Directory, Ref
from ratchet.transport.weights.base import SendReport, WeightSender
from ratchet.types import PolicyVersion, RoleInfo, Term, WeightManifest, WeightProbe

R = TypeVar("R")

_REASON_S: Final = 5.0
"""An engine's reply may come this much later than the transfer's deadline: it says why."""

_WORDS_S: Final = 2.0
"""How long an engine that the sender has lost may take to say how it went; if it lives, it was just
told to stop waiting.
"""


class AskFunction(Protocol):
    """`Actor.ask`: registers the wait, and always has a deadline."""

    def __call__(self, ref: Ref, message: Ask[R], *, timeout: float | None = None) -> Awaitable[R]:
        """Ask and await the reply."""
        ...


class Ends(TypedDict):
    """What the parts of a trainer take from their actor, as arguments by name."""

    directory: Directory
    ask: AskFunction
    now: Callable[[], float]
    log: Log


class Transferred(NamedTuple):
    """How one transfer went."""

    version: PolicyVersion
    sent: SendReport | None
    """None if the sender says that no engine got everything"""
    loaded: Mapping[RoleInfo, WeightsLoaded]
    """the engines that hold the version, verified"""
    failed: Mapping[RoleInfo, str]
    """the others, and why"""
    seconds: float


Loads: TypeAlias = dict[str, asyncio.Future[WeightsLoaded]]
"""By engine, as it was planned: the reply to come."""


class Transfers:
    """Carries versions to engines, one transfer at a time."""

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
        self._sender = sender
        self._directory = directory
        self._ask = ask
        self._now = now
        self._timeout_s = timeout_s
        self._log = log

    async def run(
        self,
        term: Term,
        version: PolicyVersion,
        step: int,
        engines: Sequence[RoleInfo],
        *,
        probe: WeightProbe | None = None,
        cut: asyncio.Future[str] | None = None,
    ) -> Transferred:
        """Offer a version to engines.

        Args:
            term: of the trainer.
            version: what the weights are called.
            step: their optimiser step.
            engines: whom to offer it to.
            probe: what the weights compute, for engines that cannot be read back.
            cut: for a catch-up, which goes point to point: its result ends the transfer, and says
                why.

        Raises:
            StaleTerm: if an engine has seen a newer trainer.
        """
        started = self._now()
        if not engines:
            return Transferred(version, None, {}, {}, 0.0)
        planned = {f"{engine.name}/{engine.incarnation}": engine for engine in engines}
        manifest, routes = self._sender.plan(
            term, version, step, list(planned), catch_up=cut is not None
        )
        offered = manifest if probe is None else msgspec.structs.replace(manifest, probe=probe)
        loads: Loads = {
            name: asyncio.ensure_future(  # noqa: TID251 - ends in this function
                self._ask(
                    self._directory.ref(engine.name),
                    LoadWeights(engine.incarnation, offered, routes[name]),
                    timeout=self._timeout_s + _REASON_S,
                )
            )
            for name, engine in planned.items()
        }
        try:
            sent, lost = await self._send(manifest, loads, cut)
            self._abort(manifest, planned, loads, lost)
            await _settle(loads, lost, cut)
            if sent is not None and cut is not None and cut.done():  # after all was sent
                lost = dict.fromkeys(loads, cut.result())
                self._abort(manifest, planned, loads, lost)
            loaded, failed = _judge(planned, loads, sent, lost)
        except BaseException:  # fenced, the trainer's own weights cannot be read, or it stops
            given_up = dict.fromkeys(loads, "the trainer gave the transfer up")
            self._abort(manifest, planned, loads, given_up)
            raise
        finally:
            for load in loads.values():
                load.cancel()
            await asyncio.gather(*loads.values(), return_exceptions=True)
        for engine, detail in failed.items():
            self._log.warning("engine_failed", engine=engine.name, version=version, detail=detail)
        return Transferred(version, sent, loaded, failed, self._now() - started)

    async def _send(
        self, manifest: WeightManifest, loads: Loads, cut: asyncio.Future[str] | None
    ) -> tuple[SendReport | None, Mapping[str, str]]:
        """Send; return what was sent, and which engines were lost, and why."""
        sending = asyncio.ensure_future(  # noqa: TID251 - ends in this function
            self._sender.send(manifest)
        )
        names = {load: name for name, load in loads.items()}
        waiting: set[asyncio.Future[Any]] = {sending, *names}
        if cut is not None:
            waiting.add(cut)
        try:
            while not sending.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for load in (each for each in names if each in done):  # in their order
                    error = load.exception()
                    _check_fatal(error)
                    if error is not None and not isinstance(error, WeightsMismatch):
                        # one that finds other weights than its own takes the rest all the same
                        self._sender.leave(names[load], str(error))
                if cut is not None and cut.done() and not sending.done():
                    raise TransferFailed(cut.result())
            report = sending.result()
        except TransferFailed as error:
            self._log.warning("transfer_failed", version=manifest.version, detail=str(error))
            return None, dict.fromkeys(loads, str(error))
        finally:
            if not sending.done():
                sending.cancel()
                await asyncio.wait([sending])
        return report, report.lost

    def _abort(
        self,
        manifest: WeightManifest,
        planned: Mapping[str, RoleInfo],
        loads: Loads,
        lost: Mapping[str, str],
    ) -> None:
        """Tell engines that still wait for a transfer that it will not come."""
        for name, reason in lost.items():
            if not loads[name].done():
                abort = AbortLoad(manifest.term, manifest.version, reason)
                self._directory.ref(planned[name].name).tell(abort)


async def _settle(loads: Loads, lost: Mapping[str, str], cut: asyncio.Future[str] | None) -> None:
    """Wait for the engines' answers; for the lost ones no longer than `_WORDS_S`, and once it is
    cut, for none.
    """
    if others := [load for name, load in loads.items() if name not in lost]:
        if cut is None:
            await asyncio.wait(others)
        else:  # a catch-up is of one engine
            either: list[asyncio.Future[Any]] = [*others, cut]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if cut is not None and cut.done():
        return
    if late := [load for load in loads.values() if not load.done()]:
        await asyncio.wait(late, timeout=_WORDS_S)


def _judge(
    planned: Mapping[str, RoleInfo],
    loads: Loads,
    sent: SendReport | None,
    lost: Mapping[str, str],
) -> tuple[dict[RoleInfo, WeightsLoaded], dict[RoleInfo, str]]:
    """Say who holds the version, and why the others do not: an engine's own word counts first."""
    loaded: dict[RoleInfo, WeightsLoaded] = {}
    failed: dict[RoleInfo, str] = {}
    for name, engine in planned.items():
        load = loads[name]
        if not load.done():
            failed[engine] = f"{engine.name} does not answer: {lost[name]}"
        elif (error := load.exception()) is not None:
            _check_fatal(error)
            failed[engine] = str(error)
        elif sent is not None and load.result().digest != sent.digest:
            digest = load.result().digest
            failed[engine] = f"{engine.name} holds digest {digest}, the trainer sent {sent.digest}"
        else:
            loaded[engine] = load.result()
    return loaded, failed


def _check_fatal(error: BaseException | None) -> None:
    """Return if an engine's error is its own affair.

    Raises:
        StaleTerm: if the engine has seen a newer trainer.
        Exception: what no engine raises on purpose.
    """
    if isinstance(error, StaleTerm) or not isinstance(error, RatchetError | None):
        raise error
