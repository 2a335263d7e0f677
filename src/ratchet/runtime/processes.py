"""The local supervisor: the roles of a run that are placed on this machine, as processes.

Consumes a checked run directory and the placement; produces the processes, and one outcome when
they have ended. It waits for the tree of their supervisors (`ratchet.runtime.tree`), or to be told
to stop. A process never outlives its launcher: its standard input is a pipe that only the launcher
holds, whose end ends the role; and a reaper kills the process groups that are left.
"""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from ratchet.config import Config
from ratchet.observability.logs import Log
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.checkpoint_store import ChosenStart
from ratchet.runtime.child import Reaper, RoleProcess
from ratchet.runtime.placement import Placement
from ratchet.runtime.role import RoleOutcome, log_name
from ratchet.runtime.tree import build_tree, run_tree
from ratchet.types import RoleKind


class LocalSupervisor:
    """Starts, restarts and stops the processes of one run on this machine.

    Args:
        config: of the run.
        run: its directory.
        placement: the roles, and what they are told.
        log: of the launcher.
        on_escalation: told the first cause when this launcher gives up, before it stops its roles.
            It has a short time; a failure of it is logged.
    """

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        *,
        placement: Placement,
        log: Log,
        on_escalation: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._config = config
        self._run = run
        self._placement = placement
        self._log = log
        self._on_escalation = on_escalation
        self._start = ChosenStart(run, placement.start_step)
        self._stops_training = False

    async def run(self, stop: asyncio.Event, kill: asyncio.Event) -> RoleOutcome:
        """Run until the trainer ends (or all roles, where it is elsewhere), or a role fails for
        good, or `kill` is set.

        `stop` ends training in order: the step in hand is finished and the model written.
        """
        reaper = Reaper(self._log)
        reaper.start()
        try:
            children = [
                (kind, self._child(kind, name, reaper)) for kind, name in self._placement.roles
            ]
            trainers = [child for kind, child in children if kind == "trainer"]

            def stop_training() -> bool:
                self._stops_training = True  # one that is about to start hears of it then
                for trainer in trainers:
                    trainer.tell(b"stop")
                return bool(trainers)

            root = build_tree(
                children,
                self._config,
                log=self._log,
                on_escalation=self._on_escalation,
            )
            return await run_tree(root, stop=stop, kill=kill, stop_training=stop_training)
        finally:
            await reaper.close()

    def _child(self, kind: RoleKind, name: str, reaper: Reaper) -> RoleProcess:
        spec = self._placement.spec(kind, name, "")
        module = "ratchet.runtime.role" if spec.ranks is None else "ratchet.runtime.ranks"
        return RoleProcess(
            name,
            command=[sys.executable, "-m", module],
            env={
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # a peer's death is told by our own log
                **os.environ,
                "OMP_NUM_THREADS": str(self._config.runtime.threads),
            },
            first_lines=partial(self._first_lines, kind, name),
            errors=self._run.logs / f"{log_name(spec.role)}.err",
            reaper=reaper,
            log=self._log,
        )

    def _first_lines(self, kind: RoleKind, name: str) -> list[bytes]:
        spec = self._placement.spec(kind, name, uuid.uuid4().hex[:12])
        if kind != "trainer":
            return [msgspec.json.encode(spec)]
        spec = msgspec.structs.replace(spec, start_step=self._start.step())
        return [msgspec.json.encode(spec), *([b"stop"] if self._stops_training else [])]
