"""The one thread that does an engine's work: commands between steps, steps while there is work.

Consumes commands from a queue, in order; waits for the next one whenever there is nothing to step.
It ends at `stop`, or at the first exception that is not a command's own `RatchetError`; then every
call that waits, and every later one, fails with the reason.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ratchet.errors import GenerationFailed, RatchetError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class StepThread:
    """A thread that runs `step` as long as `can_step`, and every command between two steps."""

    def __init__(
        self,
        *,
        step: Callable[[], None],
        can_step: Callable[[], bool],
        ended: Callable[[GenerationFailed], None],
    ) -> None:
        """Take what to run.

        Args:
            step: one piece of work, on the thread.
            can_step: whether there is any, on the thread; commands change the answer.
            ended: told on the event loop, once, why there will be no more steps.
        """
        self._step = step
        self._can_step = can_step
        self._ended = ended
        self._stopping = False
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # a daemon, so that a process that ends without `stop` does not wait for it
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reason: GenerationFailed | None = None
        self._broke = asyncio.Event()
        self._calls: set[asyncio.Future[Any]] = set()

    # --- on the event loop

    @property
    def has_ended(self) -> bool:
        """Whether nothing will run any more."""
        return self._reason is not None

    def start(self) -> None:
        """Begin to take commands, for the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def check(self) -> None:
        """Raise unless commands will run.

        Raises:
            GenerationFailed: if the thread was not started or has ended.
        """
        if self._reason is not None:
            raise GenerationFailed(str(self._reason))
        if self._loop is None:
            msg = "the engine was not started"
            raise GenerationFailed(msg)

    async def broken(self) -> str:
        """Wait until the thread breaks, and not until it is stopped; return the reason."""
        await self._broke.wait()
        return str(self._reason)

    def put(self, command: Callable[[], None]) -> None:
        """Have a command run as soon as the current step ends, after those put before."""
        self._commands.put(command)

    async def call(self, command: Callable[[], T]) -> T:
        """Run a command like `put`, and return what it returns or raise its `RatchetError`.

        Raises:
            GenerationFailed: if the thread was not started or has ended.
        """
        self.check()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self.put(partial(self._execute, command, future))
        return await future

    async def stop(self) -> None:
        """End after the current step, and wait for that. Idempotent."""
        if self._loop is None or self.has_ended:
            return
        self._commands.put(self._stop)
        await asyncio.to_thread(self._thread.join)
        self._end(GenerationFailed("the engine was closed"))

    def _end(self, reason: GenerationFailed) -> None:
        if self._reason is not None:
            return
        self._reason = reason
        for future in list(self._calls):
            settle(future, GenerationFailed(str(reason)))
        self._ended(reason)

    def _break(self, reason: GenerationFailed) -> None:
        self._end(reason)
        self._broke.set()

    # --- on the thread

    def notify(self, callback: Callable[..., None], *args: Any) -> None:
        """Run a callback on the event loop."""
        assert self._loop is not None  # noqa: S101 - set before the thread starts
        self._loop.call_soon_threadsafe(callback, *args)

    def _main(self) -> None:
        try:
            self._take_commands()
            while not self._stopping:
                self._step()
                self._take_commands()
        except Exception as error:  # noqa: BLE001 - whatever it is, all who wait must hear of it
            reason = f"the engine broke: {type(error).__name__}: {error}"
            self.notify(self._break, GenerationFailed(reason))

    def _take_commands(self) -> None:
        while not self._stopping and not (self._can_step() and self._commands.empty()):
            self._commands.get()()

    def _execute(self, command: Callable[[], T], future: asyncio.Future[T]) -> None:
        try:
            result: T | RatchetError = command()
        except RatchetError as error:
            result = error
        self.notify(settle, future, result)

    def _stop(self) -> None:
        self._stopping = True


def settle(future: asyncio.Future[Any], result: object) -> None:
    """Give a future its result, or the error that is its result, unless it is done already."""
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
