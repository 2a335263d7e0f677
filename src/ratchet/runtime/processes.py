"""The local supervisor: the roles of a run as processes of this machine.

Consumes a checked run directory; produces the processes, and one outcome when the run has ended. It
waits for any of them to end, or to be told to stop. A rollout worker that dies is started again, at
most `runtime.max_restarts` times within `runtime.restart_window_s`; any other role that dies ends
the run, with the first cause. A process never outlives its launcher: its standard input is a pipe
that only the launcher holds, and the end of that pipe ends the process, also after a kill -9.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from ratchet.config import Config
from ratchet.observability.logs import Log
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.placement import Placement, RoleSpec
from ratchet.runtime.role import RoleOutcome, log_name
from ratchet.types import RoleKind

_TERM_S: Final = 7.0
_REGISTRY_TERM_S: Final = 1.5
"""Seconds from SIGTERM to SIGKILL; together they leave all gone within ten."""


class Restarts:
    """How often one worker was started within the window: pure, the clock is the caller's."""

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._starts: deque[float] = deque()

    def note_start(self, now: float) -> None:
        """Count a start, the first one included."""
        self._starts.append(now)

    def recent(self, now: float) -> int:
        """Return the starts of the last `window_s` seconds."""
        while self._starts and now - self._starts[0] > self._window_s:
            self._starts.popleft()
        return len(self._starts)

    def exhausted(self, now: float) -> bool:
        """Whether one more start would be more than `max_restarts` restarts within the window."""
        return self.recent(now) > self._max_restarts


@dataclass(eq=False)
class Child:
    """One running process."""

    spec: RoleSpec
    process: asyncio.subprocess.Process
    restarts: Restarts

    @property
    def name(self) -> str:
        """The role's name."""
        return self.spec.role.name


class LocalSupervisor:
    """Starts, restarts and stops the processes of one run."""

    def __init__(
        self, config: Config, run: RunDirectory, *, placement: Placement, log: Log
    ) -> None:
        self._config = config
        self._run = run
        self._placement = placement
        self._log = log
        self._children: dict[str, Child] = {}

    async def run(self, stop: asyncio.Event, kill: asyncio.Event) -> RoleOutcome:
        """Run until the trainer ends, a role fails for good, or `kill` is set.

        `stop` ends training in order: the step in hand is finished and the model written.
        """
        try:
            for kind, name in self._placement.roles:
                runtime = self._config.runtime
                restarts = Restarts(runtime.max_restarts, runtime.restart_window_s)
                self._children[name] = await self._start(kind, name, restarts)
            return await self._supervise(stop, kill)
        finally:
            await self._stop_all()

    async def _start(self, kind: RoleKind, name: str, restarts: Restarts) -> Child:
        spec = self._placement.spec(kind, name, uuid.uuid4().hex[:12])
        module = "ratchet.runtime.role" if spec.ranks is None else "ratchet.runtime.ranks"
        with (self._run.logs / f"{log_name(spec.role)}.err").open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is for the launcher: it stops the roles in order
                env={
                    "TORCH_CPP_LOG_LEVEL": "ERROR",  # a peer's death is told by our own log
                    **os.environ,
                    "OMP_NUM_THREADS": str(self._config.runtime.threads),
                },
            )
        child = Child(spec, process, restarts)
        self._tell(child, msgspec.json.encode(spec))
        restarts.note_start(asyncio.get_running_loop().time())
        self._log.info("process_started", name=name, pid=process.pid)
        return child

    async def _supervise(self, stop: asyncio.Event, kill: asyncio.Event) -> RoleOutcome:
        loop = asyncio.get_running_loop()
        ends = {loop.create_task(c.process.wait()): c for c in self._children.values()}
        killed = loop.create_task(kill.wait())
        stopped = loop.create_task(stop.wait())
        try:
            while True:
                done, _ = await asyncio.wait(
                    {*ends, killed, *([] if stopped.done() else [stopped])},
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if killed in done:
                    return RoleOutcome("stopped", "interrupted")
                if stopped in done:
                    for child in self._children.values():
                        if child.spec.role.kind == "trainer":
                            self._tell(child, b"stop")
                for task in done & ends.keys():
                    child = ends.pop(task)
                    outcome = await self._ended(child)
                    if outcome is not None:
                        return outcome
                    again = self._children[child.name]
                    if again is child:  # in order: the run is over
                        continue
                    ends[loop.create_task(again.process.wait())] = again
        finally:
            for task in (*ends, killed, stopped):
                task.cancel()

    async def _ended(self, child: Child) -> RoleOutcome | None:
        """Judge the end of a process; None if it was started again."""
        outcome = await self._last_words(child)
        role = child.spec.role
        if role.kind == "trainer" or outcome.status in {"user_error", "run_failed"}:
            return outcome
        if outcome.status == "finished":
            return None
        self._log.warning("process_ended", name=role.name, detail=outcome.detail)
        if role.kind != "rollout":
            detail = f"{role.name} ended: {outcome.detail or outcome.status}"
            return RoleOutcome("failed", detail)
        now = asyncio.get_running_loop().time()
        if child.restarts.exhausted(now):
            detail = (
                f"{role.name} died {child.restarts.recent(now)} times within"
                f" {self._config.runtime.restart_window_s:g} s (runtime.max_restarts);"
                f" last: {outcome.detail}"
            )
            return RoleOutcome("failed", detail)
        self._children[role.name] = await self._start(role.kind, role.name, child.restarts)
        return None

    async def _last_words(self, child: Child) -> RoleOutcome:
        code = child.process.returncode
        text = b""
        if child.process.stdout is not None:
            text = await child.process.stdout.read()
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(text, type=RoleOutcome)
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        detail = f"{child.name} died of {how}; see {self._run.logs / log_name(child.spec.role)}.err"
        return RoleOutcome("failed", detail)

    @staticmethod
    def _tell(child: Child, line: bytes) -> None:
        if child.process.stdin is not None and not child.process.stdin.is_closing():
            child.process.stdin.write(line + b"\n")

    async def _stop_all(self) -> None:
        """First the roles, then the registry that they report to; by force what does not go."""
        living = [c for c in self._children.values() if c.process.returncode is None]
        registry = [child for child in living if child.spec.role.kind == "registry"]
        await self._end([child for child in living if child not in registry], _TERM_S)
        await self._end(registry, _REGISTRY_TERM_S)

    async def _end(self, children: Sequence[Child], within_s: float) -> None:
        if not children:
            return
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                child.process.terminate()
        waits = [asyncio.ensure_future(child.process.wait()) for child in children]
        await asyncio.wait(waits, timeout=within_s)
        for child in children:
            if child.process.returncode is None:
                self._log.warning("process_killed", name=child.name)
                with contextlib.suppress(ProcessLookupError):
                    child.process.kill()
        await asyncio.wait(waits)
