"""An asyncio event loop whose time is virtual, shared by simulated processes.

When nothing is ready, time jumps to the next timer instead of waiting for it, so that an hour of
timeouts passes in milliseconds, and passes the same way each time. When nothing is ready and no
timer is left, nothing can ever happen again: `Deadlock`. A simulation uses no threads: one that
calls in while the loop still has something to do is heard, but when is up to the scheduler.

Every callback belongs to the `Process` in whose context it was scheduled, or to none: that is the
simulation itself. What is ready at the same moment runs in the order of its scheduling within a
process, and in a seeded order between processes, as nothing orders those in reality. A process has
a monotonic clock of its own, can be stopped (its callbacks wait until it goes on, as after a
SIGSTOP), and can die: then nothing of it ever runs again, not even a `finally`.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import selectors
import weakref
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

T = TypeVar("T")

_TICK_S = 2e-9
"""The shortest wait. asyncio is content with a time that is a nanosecond early; who then waits for
the rest, which is too small for a float, must see time go on all the same."""


class Deadlock(RuntimeError):  # noqa: N818 - reads as the event it reports
    """Nothing is ready, no timer is left, and what was to be run is not done."""


class Process:
    """One life of a simulated process.

    Args:
        name: what it is called; its next life is another object.
        offset: of its monotonic clock, seconds; the clocks of two machines have nothing in common.
        rate: seconds of its clock per second of the simulation.
    """

    def __init__(self, name: str, *, offset: float = 0.0, rate: float = 1.0) -> None:
        self.name = name
        self.dead = False
        self._offset = offset
        self._rate = rate
        self._held: list[asyncio.Handle] | None = None

    def __repr__(self) -> str:
        return f"<Process {self.name}>"

    def local(self, now: float) -> float:
        """What its clock shows at a second of the simulation."""
        return self._offset + self._rate * now

    def at(self, local: float) -> float:
        """The second of the simulation at which its clock shows this."""
        return (local - self._offset) / self._rate

    @property
    def runs(self) -> bool:
        """It is neither stopped nor dead."""
        return self._held is None

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function inside it: what that schedules belongs to it."""
        return self.context().run(function, *args)

    def context(self) -> Context:
        """A context for a callback of it."""
        context = copy_context()
        context.run(current_process.set, self)
        return context

    def stop(self, loop: VirtualLoop) -> None:
        """Let nothing of it run until `go_on`: SIGSTOP. After the end, what is left of it ends."""
        if self._held is None and not loop.ending:
            self._held = []
            loop.stopped.append(self)

    def go_on(self, loop: VirtualLoop) -> None:
        """Run what has become due meanwhile: SIGCONT."""
        if self.dead or self._held is None:
            return
        held, self._held = self._held, None
        loop.resume(held)

    def die(self, loop: VirtualLoop) -> None:
        """Let nothing of it run any more."""
        self.stop(loop)
        self.dead = True

    def release(self, loop: VirtualLoop) -> None:
        """Let what is left of it be cancelled, after the end of everything."""
        self.dead = False
        self.go_on(loop)

    def hold(self, handle: asyncio.Handle) -> bool:
        """Keep a callback that may not run now; False if it may."""
        if self._held is None:
            return False
        self._held.append(handle)
        return True


current_process: ContextVar[Process | None] = ContextVar("current_process", default=None)


class _Handle(asyncio.Handle):
    process: Process | None = None

    def _run(self) -> None:
        if self.process is None or not self.process.hold(self):
            super()._run()  # type: ignore[misc]


class _TimerHandle(asyncio.TimerHandle):
    process: Process | None = None

    def when(self) -> float:
        when: float = self._when  # type: ignore[attr-defined]
        return when if self.process is None else self.process.local(when)

    def _run(self) -> None:
        if self.process is None or not self.process.hold(self):
            super()._run()  # type: ignore[misc]


class _JumpingSelector(selectors.DefaultSelector):
    """Polls the file descriptors, if there are any; where it would wait, it moves the clock."""

    def __init__(self, explain: Callable[[], str], *, polls: bool) -> None:
        super().__init__()
        self.now = 0.0
        self._explain = explain
        self._polls = polls

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events: list[tuple[selectors.SelectorKey, int]] = super().select(0) if self._polls else []
        if events or (timeout is not None and timeout <= 0):
            return events
        if timeout is None:
            raise Deadlock(f"at {self.now:g} s nothing can happen any more\n{self._explain()}")
        self.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s.

    Args:
        explain: called on a deadlock; its text becomes part of the error, for instance the table of
            waits. By default the names of the pending tasks.
        seed: of the order between processes; None keeps the order of scheduling. With one, nothing
            comes from outside: file descriptors are not polled, which takes a tenth of a world.
    """

    def __init__(self, explain: Callable[[], str] | None = None, seed: int | None = None) -> None:
        self._virtual = _JumpingSelector(explain or self._pending, polls=seed is None)
        self._order = None if seed is None else random.Random(f"order/{seed}")
        super().__init__(self._virtual)
        self.stopped: list[Process] = []
        """processes that were ever stopped, or have died"""
        self._tasks: weakref.WeakKeyDictionary[asyncio.Task[Any], None] = (
            weakref.WeakKeyDictionary()
        )
        self.ending = False
        """the simulation is over, and what is left of it is being cancelled"""
        self.threads: dict[Any, None] = {}
        """of the product, which run here as well (`threads.py`)"""
        self.at_close: list[Callable[[], object]] = []

    @property
    def now(self) -> float:
        """Virtual seconds, whichever process asks."""
        return self._virtual.now

    def time(self) -> float:
        """Virtual seconds, by the clock of the process that asks."""
        process = current_process.get()
        return self._virtual.now if process is None else process.local(self._virtual.now)

    def call_in(
        self, process: Process | None, delay_s: float, callback: Callable[..., object], *args: Any
    ) -> asyncio.Handle:
        """Call something inside a process, or outside all, in seconds of the simulation."""
        context = copy_context()
        context.run(current_process.set, process)
        if delay_s <= 0:
            return self._call_soon(callback, args, context)
        return self._schedule(self._virtual.now + delay_s, callback, args, context, process)

    def resume(self, handles: list[asyncio.Handle]) -> None:
        """Make callbacks ready that were held back."""
        self._ready.extend(handles)  # type: ignore[attr-defined]

    # --- what asyncio calls

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedule by the clock of the process that asks."""
        process = _process_of(context)
        now = self._virtual.now
        later = when > (now if process is None else process.local(now))
        if process is not None:
            when = process.at(when)
        if later:
            when = max(when, now + _TICK_S)
        return self._schedule(when, callback, args, context, process)

    def _schedule(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: Context | None,
        process: Process | None,
    ) -> asyncio.TimerHandle:
        timer = _TimerHandle(when, callback, args, self, context)
        timer.process = process
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def _call_soon(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        handle.process = _process_of(context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        """Create a task of the process that asks, also in a context of its own."""
        if context is not None and current_process not in context:
            context.run(current_process.set, current_process.get())
        task = super().create_task(coro, name=name, context=context)
        self._tasks[task] = None
        return task

    def tasks(self) -> list[asyncio.Task[Any]]:
        """What `asyncio.all_tasks` returns, but in the order in which they began."""
        return [task for task in self._tasks if not task.done()]

    def close(self) -> None:
        """End for good, then do what was to be done after that."""
        super().close()
        while self.at_close:
            self.at_close.pop()()

    def _run_once(self) -> None:
        if self._order is not None and len(self._ready) > 1:  # type: ignore[has-type]
            groups: dict[Process | None, list[asyncio.Handle]] = {}
            for handle in self._ready:  # type: ignore[has-type]
                groups.setdefault(getattr(handle, "process", None), []).append(handle)
            if len(groups) > 1:
                order = list(groups.values())
                self._order.shuffle(order)
                self._ready.clear()  # type: ignore[has-type]
                for group in order:
                    self._ready.extend(group)  # type: ignore[has-type]
        super()._run_once()  # type: ignore[misc]

    def _pending(self) -> str:
        return "pending: " + ", ".join(sorted(t.get_name() for t in asyncio.all_tasks(self)))


def _process_of(context: Context | None) -> Process | None:
    return current_process.get() if context is None else context.get(current_process)


def run_virtual(
    main: Coroutine[Any, Any, T],
    *,
    explain: Callable[[], str] | None = None,
    seed: int | None = None,
) -> T:
    """`asyncio.run` in virtual time.

    Raises:
        Deadlock: `main` waits for something that can never happen.
    """
    loop = VirtualLoop(explain, seed)

    async def whole() -> T:
        try:
            return await main
        finally:  # tasks of the dead end as well, but not before the end of everything
            loop.ending = True
            for task in loop.tasks():
                if task is not asyncio.current_task():
                    task.cancel()
            for process in loop.stopped:
                process.release(loop)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(whole())
