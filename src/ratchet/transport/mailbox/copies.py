"""The threads on which a node copies much into shared memory, while its loop goes on.

Consumes loans, fills them; the kernel copies, without the interpreter's lock. They wait for work,
and `close` ends them. A simulation shares nothing, and has no such threads.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor  # noqa: TID251 - see above
from typing import Final

from ratchet.transport.mailbox.shared import Loan

_THREADS: Final = 2
"""A lane lends the next message while it waits for one; half of a copy is the kernel's search for
pages, which two can do at once.
"""


class Copies:
    """Threads, from the first copy on."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="copies")

    def start(self, loan: Loan) -> asyncio.Future[bool]:
        """Fill a loan; the result is True, or the `OSError` of `Loan.fill`. Nobody else may fill it
        any more; the thread keeps it, whatever becomes of its message.
        """
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._threads, loan.fill, loan.num_bytes)

    def close(self) -> None:
        """Wait for what is being copied, at most `Limits.message_bytes` by each; copy no more."""
        self._threads.shutdown(cancel_futures=True)
