"""All roles of a run in this process, on one event loop: for debugging, notebooks and tests.

Consumes a checked run directory, produces one outcome; waits for the tree of supervisors, which is
that of a run of processes (`ratchet.runtime.tree`). Actors, messages, weight transport and files
are those of a run of processes too; only the links are missing. A trainer or a rollout worker that
fails is started again, as a new life with a new model or engine.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable

from ratchet.actors.actor import LocalRef
from ratchet.actors.restarts import End
from ratchet.actors.system import System
from ratchet.config import Config
from ratchet.errors import UserError
from ratchet.messages import StopTraining
from ratchet.observability.logs import Log
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.checkpoint_store import ChosenStart
from ratchet.runtime.compose import role_names, start_role
from ratchet.runtime.role import EndOfActor, RoleOutcome, outcome_of
from ratchet.runtime.tree import build_tree, role_end, run_tree
from ratchet.tasks.base import Task
from ratchet.types import RoleInfo, RoleKind


class RoleInProcess:
    """Implements `Child`: an actor of this process.

    Args:
        kind: of the role.
        name: of the role.
        system: where it runs.
        start: starts one life of the actor.
    """

    def __init__(
        self, kind: RoleKind, name: str, *, system: System, start: Callable[[RoleInfo], LocalRef]
    ) -> None:
        self.name = name
        self._kind = kind
        self._system = system
        self._start = start
        self._ref: LocalRef | None = None
        self._refused: UserError | None = None
        self._stops_training = False
        self._end = EndOfActor(name)

    async def start(self) -> None:
        """Start the actor under a new incarnation; what it refuses of the user's is its end."""
        self._end = EndOfActor(self.name)
        self._ref = self._refused = None
        try:
            self._ref = self._start(RoleInfo(self._kind, self.name, self._system.new_id()[:12]))
        except UserError as error:
            self._refused = error
        else:
            self._ref.watch(self._end)
            if self._stops_training:
                self.stop_training()

    async def ended(self) -> End:
        """Wait for the actor to end."""
        if self._refused is not None:
            return role_end(self.name, RoleOutcome("user_error", str(self._refused)))
        reason = await asyncio.shield(self._end.reason)
        return role_end(self.name, outcome_of(reason, self._system.run_ended))

    async def stop(self) -> None:
        """Let the actor handle what is queued, and end."""
        if self._ref is not None:
            await self._ref.stop(block=False)

    async def kill(self) -> None:
        """Do nothing: an actor that hangs has lost its name, and ends with its loop."""

    def stop_training(self) -> None:
        """Tell the trainer to end in order; one that is about to start hears of it then."""
        self._stops_training = True
        if self._ref is not None:
            self._ref.tell(StopTraining("asked to stop"))


async def run_in_process(
    config: Config,
    run: RunDirectory,
    *,
    run_id: str,
    task: Task,
    log: Log,
    stop: asyncio.Event,
    kill: asyncio.Event,
    start_step: int | None = None,
) -> RoleOutcome:
    """Run until the trainer ends, a role fails for good, or `kill` is set.

    The trainer begins with the checkpoint of `start_step`, or with the newest, if there is one.
    """
    system = System(
        rng=random.Random(config.seed),  # noqa: S311
        wall_time=time.time,
        new_id=lambda: uuid.uuid4().hex,
        log=log,
        ask_timeout_s=config.runtime.ask_timeout_s,
        registry_wait_s=config.runtime.registry_wait_s,
    )

    chosen = ChosenStart(run, start_step)

    def start(role: RoleInfo) -> LocalRef:
        return start_role(
            system,
            role,
            config=config,
            run=run,
            run_id=run_id,
            task=task,
            in_process=True,
            start_step=chosen.step(),
        )

    children = [
        (kind, RoleInProcess(kind, name, system=system, start=start))
        for kind, name in role_names(config)
    ]

    def stop_training() -> bool:
        for kind, child in children:
            if kind == "trainer":
                child.stop_training()
        return True

    root = build_tree(children, config, log=log)
    return await run_tree(root, stop=stop, kill=kill, stop_training=stop_training)
