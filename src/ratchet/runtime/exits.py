"""The exit of a child process as an event of the loop.

Consumes a process id, produces one call; waits for the kernel, which tells it through a file
descriptor of the process (pidfd): no thread, no SIGCHLD handler, no polling.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable


def when_exited(pid: int, then: Callable[[], None]) -> None:
    """Call `then` on the running loop once a child has exited, before anybody reaps it."""
    loop = asyncio.get_running_loop()
    watched = os.pidfd_open(pid)

    def exited() -> None:
        loop.remove_reader(watched)
        os.close(watched)
        then()

    loop.add_reader(watched, exited)
