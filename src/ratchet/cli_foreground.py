"""A command that stays until its run has ended: signals, a view, an exit code.

Consumes the work and a viewer of it, produces what the work returned and the exit code that the
signals ask for. The view has a thread of its own. It waits for the work, then for the view to have
shown the rest; a signal ends that wait, for where nobody reads what is shown, nothing else would.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from ratchet.observability.live import Viewer

T = TypeVar("T")

_UNREAD_S: Final = 2.0


def in_foreground(
    work: Callable[[], Coroutine[Any, Any, T]], interrupt: Callable[[], None], viewer: Viewer
) -> tuple[T, int]:
    """Do the work on a loop of its own; return its result, and the exit code.

    Args:
        work: ends soon after `interrupt`.
        interrupt: called on the loop for each SIGINT and SIGTERM.
        viewer: of the work. When its output is closed the work goes on unseen.
    """
    return asyncio.run(_run(work, interrupt, viewer))


async def _run(
    work: Callable[[], Coroutine[Any, Any, T]], interrupt: Callable[[], None], viewer: Viewer
) -> tuple[T, int]:
    loop = asyncio.get_running_loop()
    signals: list[int] = []
    told = asyncio.Event()

    def interrupted(number: int) -> None:
        signals.append(number)
        told.set()
        interrupt()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted, number)
    view = _View(viewer)
    try:
        result = await work()
    finally:
        viewer.stop()
        if not await view.shown(told):
            os._exit(128 + signals[0])  # the thread holds the lock of an output that nobody reads
    if view.error is not None:
        raise view.error
    return result, 128 + signals[0] if signals else 0


class _View:
    """The thread of a viewer."""

    def __init__(self, viewer: Viewer) -> None:
        self.error: BaseException | None = None
        self._viewer = viewer
        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Event()
        threading.Thread(target=self._follow, name="view", daemon=True).start()

    def _follow(self) -> None:
        try:
            self._viewer.follow()
        except (BrokenPipeError, SystemExit):  # rich raises the latter for the former
            pass
        except BaseException as error:  # noqa: BLE001 - raised where the work ends
            self.error = error
        self._loop.call_soon_threadsafe(self._done.set)

    async def shown(self, told: asyncio.Event) -> bool:
        """Wait until everything is shown; after a signal not for long."""
        done = asyncio.create_task(self._done.wait())
        signalled = asyncio.create_task(told.wait())
        await asyncio.wait({done, signalled}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({done}, timeout=_UNREAD_S)
        for task in (done, signalled):
            task.cancel()
        return self._done.is_set()
