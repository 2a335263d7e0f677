"""The weight loads of one engine: one at a time, of no older term, never back to an older version.

Consumes `LoadWeights` and `AbortLoad`, produces `WeightsLoaded` once the engine holds the version.
It waits for the transfer; a newer offer or an abort ends that wait, as does the transfer's own
timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from ratchet.actors.system import Log
from ratchet.backends.rollout.base import RolloutEngine
from ratchet.errors import StaleTerm, TransferFailed, VersionError, WeightsMismatch
from ratchet.messages import AbortLoad, LoadWeights, WeightsLoaded
from ratchet.transport.weights.base import WeightReceiver
from ratchet.types import PauseMode, PolicyVersion, RoleInfo, Term

_Load: TypeAlias = asyncio.Task[WeightsLoaded]


class WeightLoads:
    """What one engine was offered, and the load that is on its way.

    Args:
        role: of the worker that has the engine.
        engine: takes the weights.
        receiver: moves them.
        pause_mode: how the engine stands still meanwhile.
        log: of the worker.
        spawn: starts a child task of the worker.
        loaded: called when the engine holds another version.
    """

    def __init__(
        self,
        role: RoleInfo,
        engine: RolloutEngine,
        receiver: WeightReceiver,
        *,
        pause_mode: PauseMode,
        log: Log,
        spawn: Callable[[Coroutine[Any, Any, WeightsLoaded], str], _Load],
        loaded: Callable[[], None],
    ) -> None:
        self._role = role
        self._engine = engine
        self._receiver = receiver
        self._pause_mode = pause_mode
        self._log = log
        self._spawn = spawn
        self._loaded = loaded
        self._term: Term = 0
        self._offered: PolicyVersion = -1  # the newest version that was offered, loaded or not
        self._load: _Load | None = None

    @property
    def loading(self) -> PolicyVersion | None:
        """The version that is on its way."""
        return self._offered if self._load is not None and not self._load.done() else None

    def begin(self, message: LoadWeights) -> _Load:
        """Take an offer; the task ends with what the trainer is told.

        Raises:
            VersionError: if it is meant for another life of this worker, or older than another.
            StaleTerm: if a newer trainer has been here.
        """
        name, term = self._role.name, message.manifest.term
        if message.incarnation != self._role.incarnation:
            msg = (
                f"{name} {self._role.incarnation} takes no weights that are meant for its life"
                f" {message.incarnation}"
            )
            raise VersionError(msg)
        if term < self._term:
            msg = f"{name} refuses term {term}: it has seen term {self._term}"
            raise StaleTerm(msg)
        self._term = term
        version = message.manifest.version
        if version < self._offered:  # also after a failed load, when the engine holds none
            msg = f"{name} was offered version {self._offered}: it does not go back to {version}"
            raise VersionError(msg)
        self._offered = version
        previous, self._load = self._load, None
        self._load = self._spawn(self._receive(message, previous), f"load-{version}")
        return self._load

    def abort(self, message: AbortLoad) -> None:
        """End the load that the message names, if it is the one on its way."""
        if (message.term, message.version) == (self._term, self._offered):
            self._receiver.abort(message.reason)

    async def close(self) -> None:
        """Leave the transfer group."""
        self._receiver.abort("the rollout worker ends")
        await self._receiver.close()

    async def _receive(self, message: LoadWeights, previous: _Load | None) -> WeightsLoaded:
        version = message.manifest.version
        if previous is not None and not previous.done():
            self._receiver.abort(f"superseded by version {version}")
            await asyncio.wait([previous])
        if self._load is not asyncio.current_task():
            msg = f"version {version} was superseded before its transfer began"
            raise TransferFailed(msg)
        try:
            report = await self._receiver.receive(
                message.manifest, message.route, self._engine, self._pause_mode
            )
        except (TransferFailed, WeightsMismatch) as error:
            self._log.warning("load_failed", version=version, detail=str(error))
            raise
        self._log.info(
            "weights_loaded",
            version=version,
            digest=report.digest,
            move_s=report.move_s,
            load_s=report.load_s,
            paused_s=report.paused_s,
        )
        self._loaded()
        return WeightsLoaded(
            self._role.name,
            version,
            report.digest,
            report.move_s,
            report.load_s,
            report.paused_s,
        )
