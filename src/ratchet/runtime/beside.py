"""What a launcher does beside its wait for the roles.

Consumes coroutines, produces their tasks for as long as a block lasts. Waits, at its end, for what
it has cancelled. Work that fails is not lost: its error is raised at the end of the block, which it
asks for by `failed`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any


@contextlib.asynccontextmanager
async def beside(
    *work: Coroutine[Any, Any, Any], failed: Callable[[], object]
) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Do work beside a block, and cancel what is left of it at the end.

    Args:
        work: a task each.
        failed: called as soon as one of them raises, so that the block comes to its end.

    Raises:
        Exception: of the work, where the block itself has not failed.
    """

    def ended(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None:
            failed()

    tasks = [asyncio.create_task(each) for each in work]
    for task in tasks:
        task.add_done_callback(ended)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()
