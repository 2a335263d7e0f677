"""The roles of a run as processes of this host, which reach each other by Unix sockets.

Consumes a checked run directory and the roles to start; produces one outcome. Waits for the local
supervisor (`processes.py`), or to be told to stop. A trainer of ours hears of a stop from its
launcher; that of a guest, who trains in a program of his own, from the registry, which is told here
as well when the run fails. A role that is still starting then does not hear of it, and is ended
after `_LEAVE_S` seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from ratchet.actors.role import REGISTRY
from ratchet.config import Config
from ratchet.messages import EndRun
from ratchet.observability.logs import Log
from ratchet.observability.rundir import RunDirectory
from ratchet.private_folder import private_folder
from ratchet.runtime.beside import beside
from ratchet.runtime.placement import Placement, RankSpec
from ratchet.runtime.processes import LocalSupervisor
from ratchet.runtime.role import RoleOutcome
from ratchet.runtime.visitor import Visit, visit
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.credentials import load_token
from ratchet.types import RoleKind

_LEAVE_S: Final = 6.0

_PARENT_BYTES: Final = 45
"""The path of a socket may have 107 bytes (on macOS 103): so many are left for the directory that
the folder of the sockets is in, beside the folder's own name and that of a role."""

_Meet: TypeAlias = Callable[[], AbstractAsyncContextManager[Visit]]
"""Visits the registry of the run."""


async def run_processes(
    config: Config,
    run: RunDirectory,
    *,
    run_id: str,
    roles: tuple[tuple[RoleKind, str], ...],
    log: Log,
    stop: asyncio.Event,
    kill: asyncio.Event,
    start_step: int | None = None,
) -> RoleOutcome:
    """Run until the trainer ends (or all roles, where it is elsewhere), a role fails for good, or
    `kill` is set.

    The trainer begins with the checkpoint of `start_step`, or with the newest, if there is one.
    """
    with _sockets() as sockets:
        placement = _place(config, run, run_id, roles, sockets, start_step)
        meet: _Meet = partial(
            visit, placement.registry, key=placement.key, log=log, run_id=placement.run_id
        )
        supervisor = LocalSupervisor(
            config, run, placement=placement, log=log, on_escalation=partial(_tell_failure, meet)
        )
        try:
            if any(kind == "trainer" for kind, _ in roles):
                return await supervisor.run(stop, kill)
            ending = _end_on_stop(meet, stop, kill, config.runtime.ask_timeout_s)
            async with beside(ending, failed=kill.set):
                return await supervisor.run(asyncio.Event(), kill)
        finally:
            run.links.unlink(missing_ok=True)


@contextlib.contextmanager
def _sockets() -> Iterator[Path]:
    folder = private_folder("run", _parent())
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # roles may be removing their sockets


def _parent() -> Path | None:
    """Return where to make it: None, the directory for temporary files, or another one where that
    one's path is too long, as those of batch systems and of macOS are.
    """
    is_long = len(os.fsencode(tempfile.gettempdir())) > _PARENT_BYTES
    return Path("/tmp") if is_long else None  # noqa: S108 - the folder in it has mode 0700


def _place(
    config: Config,
    run: RunDirectory,
    run_id: str,
    roles: tuple[tuple[RoleKind, str], ...],
    sockets: Path,
    start_step: int | None,
) -> Placement:
    token_file = config.runtime.token_file or _make_token(sockets / "token")
    num_ranks = config.trainer.ranks_per_node
    return Placement(
        roles=roles,
        run_dir=run.root,
        run_id=run_id,
        registry=Address("unix", str(sockets / f"{REGISTRY}.sock")),
        key=load_token(token_file),
        sockets=sockets,
        config=config.to_toml(),
        token_file=Path(token_file).resolve(),
        ranks=RankSpec(num_ranks) if num_ranks > 1 else None,
        start_step=start_step,
    )


def _make_token(path: Path) -> str:
    """Write a new secret that only this user can read."""
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32) + "\n", encoding="ascii")
    return str(path)


async def _end_on_stop(
    meet: _Meet, stop: asyncio.Event, kill: asyncio.Event, wait_s: float
) -> None:
    await stop.wait()
    async with meet() as registry:
        await registry.describe(wait_s)  # it may still be starting
        registry.end_run(EndRun("launcher", "stopped", "asked to stop"))
    await asyncio.sleep(_LEAVE_S)
    kill.set()


async def _tell_failure(meet: _Meet, cause: str) -> None:
    """Tell those who have joined from elsewhere."""
    async with meet() as registry:
        registry.end_run(EndRun("launcher", "failed", cause))
