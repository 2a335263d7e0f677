"""The supervisor: starts children in order, starts them again when they end, and gives up with the
first cause when they end too often.

Consumes the ends of its children; produces starts and stops, and its own end. Waits for an end, for
the time of a restart, or to be told to stop; a child that does not stop in its time is killed. A
child may be a process, an actor, or another supervisor. All time is the event loop's, there is no
thread and nothing is polled.

Cause and consequence: a failure that says itself that it comes from another's (`End.kind` is
"consequence": "has lost the registry") is held back for `grace_s`. Whoever it blames, if it is a
child here or of a supervisor above, is heard of by then, and judged first. Ends that are found at
the same moment are judged in the order of start, for a child depends on those before it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ratchet.actors.restarts import (
    ChildRule,
    End,
    Escalate,
    Finish,
    Judge,
    Restart,
    RestartKind,
    Rules,
    Verdict,
    own_end,
)
from ratchet.actors.system import Log

ESCALATION_S: Final = 2.0
GRACE_S: Final = 1.0


class Child(Protocol):
    """Something that can be started, and started again after its end."""

    @property
    def name(self) -> str:
        """Unique among its siblings."""
        ...

    async def start(self) -> None:
        """Begin a new life. What it raises counts as an abnormal end."""
        ...

    async def ended(self) -> End:
        """Wait for the end of the present life; may be cancelled, and called again."""
        ...

    async def stop(self) -> None:
        """Ask it to end, and wait until it has; it may have before."""
        ...

    async def kill(self) -> None:
        """End it by force, with all that it has started."""
        ...


@dataclass(frozen=True)
class Member:
    """A child and its place."""

    child: Child
    restart: RestartKind = "transient"
    significant: bool = False
    stop_s: float | None = None
    """seconds until a stop becomes a kill; None for a supervisor, which bounds its own"""


class Supervisor:
    """Implements `Child`.

    Args:
        name: of this supervisor.
        members: its children, in the order of their start.
        rules: when it starts them again, and when it ends.
        log: where it logs.
        grace_s: how long a consequence is held back.
        stops_together: stop children side by side, for children that do not depend on each other;
            else one after the other.
        on_escalation: awaited before the children are stopped, at most `ESCALATION_S`.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[Member],
        rules: Rules,
        *,
        log: Log,
        grace_s: float = GRACE_S,
        stops_together: bool = False,
        on_escalation: Callable[[Escalate], Awaitable[None]] | None = None,
    ) -> None:
        self.name = name
        self._members = {member.child.name: member for member in members}
        self._rules = rules
        self._log = log
        self._grace_s = grace_s
        self._stops_together = stops_together
        self._on_escalation = on_escalation
        self._task: asyncio.Task[End] | None = None
        self._reset()

    def _reset(self) -> None:
        members = self._members.items()
        self._judge = Judge(
            [ChildRule(name, m.restart, m.significant) for name, m in members], self._rules
        )
        self._watchers: dict[str, asyncio.Task[None]] = {}
        """of the children that were started and not stopped, one each"""
        self._ends: dict[str, End] = {}
        """told, and not judged"""
        self._due: dict[str, float] = {}
        """when to start whom"""
        self._wake = asyncio.Event()
        self._told_to_stop = False

    # --- as a child

    async def start(self) -> None:
        """Begin to supervise, in a task of its own."""
        self._reset()
        self._task = asyncio.create_task(self._run(), name=self.name)  # noqa: TID251 - no actor

    async def ended(self) -> End:
        """Wait until it and its children are gone: "normal" if told to stop or all is done."""
        return await asyncio.shield(self._running)

    async def stop(self) -> None:
        """Stop the children, in reverse order, and end."""
        self._told_to_stop = True
        self._wake.set()
        await asyncio.wait([self._running])

    async def kill(self) -> None:
        """Kill the children, and end."""
        if self._task is not None:
            await self._kill(self._watchers)
            await self.stop()

    @property
    def _running(self) -> asyncio.Task[End]:
        if self._task is None:
            raise RuntimeError(f"the supervisor {self.name} was not started")
        return self._task

    # --- the loop

    async def _run(self) -> End:
        """Start the children and supervise them to the end."""
        self._due = dict.fromkeys(self._members, _now())
        try:
            verdict = await self._supervise()
            if isinstance(verdict, Escalate):
                await self._tell_escalation(verdict)
        finally:
            await self._stop_all()
        return own_end(self.name, verdict, self._rules)

    async def _supervise(self) -> Escalate | Finish | None:
        """Act on one thing after the other; None when told to stop."""
        while not self._told_to_stop:
            verdict: Verdict = None
            if self._ends:
                verdict = self._judge_first()
            elif (name := self._next_start()) is not None:
                verdict = await self._start(name)
            else:
                await self._wait()
            if isinstance(verdict, Restart):
                await self._restart(verdict)
            elif verdict is not None:
                return verdict
        return None

    async def _wait(self) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout_at(min(self._due.values(), default=None)):
                await self._wake.wait()
        except TimeoutError:
            return  # a start is due

    def _judge_first(self) -> Verdict:
        name = next(name for name in self._members if name in self._ends)
        end = self._ends.pop(name)
        self._watchers.pop(name)
        note = self._log.info if end.kind == "normal" else self._log.warning
        note("child_ended", name=name, kind=end.kind, reason=end.reason)
        return self._judge.ended(end, _now())

    def _next_start(self) -> str | None:
        due = [(at, name) for name in self._members if (at := self._due.get(name)) is not None]
        at, name = min(due, key=lambda start: start[0], default=(math.inf, None))
        return name if at <= _now() else None

    async def _start(self, name: str) -> Verdict:
        del self._due[name]
        child = self._members[name].child
        self._judge.starts(name, _now())
        try:
            await child.start()
        except Exception as error:  # noqa: BLE001 - judged like any other end
            reason = f"{name} could not start: {type(error).__name__}: {error}"
            self._log.error("child_not_started", name=name, exc_info=error)
            return self._judge.ended(End(name, "abnormal", reason), _now())
        task_name = f"{self.name}.{name}"
        watching = asyncio.create_task(self._watch(child), name=task_name)  # noqa: TID251 - no actor
        self._watchers[name] = watching
        return None

    async def _watch(self, child: Child) -> None:
        try:
            end = await child.ended()
        except Exception as error:  # noqa: BLE001 - a child that cannot be watched is lost
            end = End(child.name, "abnormal", f"{child.name}: {type(error).__name__}: {error}")
        if end.kind == "consequence":
            await asyncio.sleep(self._grace_s)
        self._ends[child.name] = end
        self._wake.set()

    async def _restart(self, verdict: Restart) -> None:
        await self._stop(verdict.stop)
        for name in verdict.start:
            self._due[name] = verdict.at
        in_s = max(0.0, verdict.at - _now())
        self._log.info("children_restart", names=verdict.start, in_s=in_s)

    # --- the end

    async def _tell_escalation(self, verdict: Escalate) -> None:
        reason = own_end(self.name, verdict, self._rules).reason
        self._log.error("supervisor_gives_up", name=self.name, reason=reason)
        if self._on_escalation is None:
            return
        try:
            async with asyncio.timeout(ESCALATION_S):
                await self._on_escalation(verdict)
        except Exception as error:  # noqa: BLE001 - it must not hide the cause, nor keep the end
            self._log.error("escalation_not_told", name=self.name, exc_info=error)

    async def _stop_all(self) -> None:
        try:
            await self._stop(name for name in reversed(self._members) if name in self._watchers)
        except asyncio.CancelledError:  # whoever runs it does not wait: end them at once
            await self._kill(self._members)
            raise

    async def _stop(self, names: Iterable[str]) -> None:
        if self._stops_together:
            await asyncio.gather(*(self._end(name) for name in tuple(names)))
            return
        for name in tuple(names):
            await self._end(name)

    async def _end(self, name: str) -> None:
        """Stop a child; its end is no failure."""
        watcher = self._watchers.pop(name)
        watcher.cancel()
        self._ends.pop(name, None)
        member = self._members[name]
        try:
            async with asyncio.timeout(member.stop_s):
                await member.child.stop()
        except Exception as error:  # noqa: BLE001 - TimeoutError above all; then it goes by force
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            self._log.warning("child_killed", name=name, after_s=member.stop_s, reason=reason)
            await member.child.kill()

    async def _kill(self, names: Iterable[str]) -> None:
        await asyncio.gather(*(self._members[name].child.kill() for name in tuple(names)))


def _now() -> float:
    return asyncio.get_running_loop().time()
