"""All roles of a run in this process, on one event loop: for debugging, notebooks and tests.

Consumes a checked run directory, produces one outcome; waits for the trainer's end, or for another
role's failure, which ends the run. Actors, messages, weight transport and files are those of a run
of processes; only the links are missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import Sequence
from typing import Any

from ratchet.actors.actor import LocalRef
from ratchet.actors.role import TRAINER
from ratchet.actors.system import System
from ratchet.config import Config
from ratchet.errors import AskTimeout
from ratchet.messages import StopTraining
from ratchet.observability.logs import Log
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.compose import role_names, start_role
from ratchet.runtime.role import EndOfActor, RoleOutcome, outcome_of
from ratchet.tasks.base import Task
from ratchet.types import RoleInfo


async def run_in_process(
    config: Config,
    run: RunDirectory,
    *,
    run_id: str,
    task: Task,
    log: Log,
    stop: asyncio.Event,
    kill: asyncio.Event,
) -> RoleOutcome:
    """Run until the trainer ends, a role fails, or `kill` is set."""
    system = System(
        rng=random.Random(config.seed),  # noqa: S311
        wall_time=time.time,
        new_id=lambda: uuid.uuid4().hex,
        log=log,
        ask_timeout_s=config.runtime.ask_timeout_s,
    )
    refs: list[LocalRef] = []
    ends: dict[asyncio.Future[str], LocalRef] = {}
    try:
        for kind, name in role_names(config):
            role = RoleInfo(kind, name, system.new_id()[:12])
            ref = start_role(system, role, config=config, run=run, run_id=run_id, task=task)
            end = EndOfActor(name)
            ref.watch(end)
            refs.append(ref)
            ends[end.reason] = ref
        return await _first_end(ends, stop, kill)
    finally:
        await _stop(refs)


async def _first_end(
    ends: dict[asyncio.Future[str], LocalRef], stop: asyncio.Event, kill: asyncio.Event
) -> RoleOutcome:
    killed = asyncio.ensure_future(kill.wait())
    stopped = asyncio.ensure_future(stop.wait())
    try:
        while True:
            waits: set[asyncio.Future[Any]] = {*ends, killed}
            if not stopped.done():
                waits.add(stopped)
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for end, ref in ends.items():
                if end not in done:
                    continue
                reason, name = end.result(), ref.name
                outcome = outcome_of(reason)
                if outcome.status == "user_error" or (name == TRAINER and reason == "stopped"):
                    return outcome
                return RoleOutcome("failed", f"{name}: {reason}")
            if killed in done:
                return RoleOutcome("stopped", "interrupted")
            for ref in ends.values():
                if ref.name == TRAINER:
                    ref.tell(StopTraining("asked to stop"))
    finally:
        killed.cancel()
        stopped.cancel()


async def _stop(refs: Sequence[LocalRef]) -> None:
    for ref in reversed(refs):  # the registry outlives those that report to it
        with contextlib.suppress(AskTimeout):  # one that hangs does not keep the others
            await ref.stop(block=False)
