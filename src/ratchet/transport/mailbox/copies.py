"""The thread on which a node copies much into shared memory, while its loop goes on.

Consumes loans, fills them in order; the kernel copies, without the interpreter's lock. It waits for
work, and `close` ends it. A simulation shares nothing, and has no such thread.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor  # noqa: TID251 - see above

from ratchet.transport.mailbox.shared import Loan


class Copies:
    """One thread, from the first copy on."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="copies")

    def start(self, loan: Loan) -> asyncio.Future[bool]:
        """Fill a loan; the result is True, or the `OSError` of `Loan.fill`. Nobody else may fill it
        any more; the thread keeps it, whatever becomes of its message.
        """
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._thread, loan.fill, loan.num_bytes)

    def close(self) -> None:
        """Wait for what is being copied, at most `Limits.message_bytes`; copy no more."""
        self._thread.shutdown(cancel_futures=True)
