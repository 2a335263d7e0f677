"""Which function of the user's own holds a loop up, said while it does.

Consumes the calls of code that runs where a loop should, produces log events; waits, on a thread of
its own that the first call starts, for nothing but the time. Such code cannot be interrupted: what
blocks for ever is named, and to mend it is the user's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from ratchet.observability.logs import Log

_SLOW_S: Final = 1.0


class _Call(msgspec.Struct, eq=False):
    name: str
    began: float
    tell_after_s: float


class OwnCalls:
    """The calls of one loop, one at a time.

    Args:
        log: gets `own_code_blocks` once a call has taken `slow_s`, and each time that it has taken
            twice as long; and `own_code_returned` when such a call ends.
        slow_s: from when on a call is slow, seconds.
    """

    def __init__(self, log: Log, slow_s: float = _SLOW_S) -> None:
        self._log = log
        self._slow_s = slow_s
        self._call: _Call | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """Watch what is called within; `name` is that of the function, for people."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="own-calls", daemon=True)
            self._thread.start()
        call = self._call = _Call(name, time.monotonic(), self._slow_s)
        try:
            yield
        finally:
            self._call = None
            seconds = time.monotonic() - call.began
            if seconds >= self._slow_s:
                self._log.warning("own_code_returned", name=name, seconds=round(seconds, 1))

    def close(self) -> None:
        """End the thread; closing again does nothing."""
        self._closed.set()

    def _main(self) -> None:
        while not self._closed.wait(self._slow_s / 4):
            call = self._call
            seconds = 0.0 if call is None else time.monotonic() - call.began
            if call is not None and seconds >= call.tell_after_s:
                call.tell_after_s *= 2
                self._log.warning("own_code_blocks", name=call.name, seconds=round(seconds, 1))
