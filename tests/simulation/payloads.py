"""The payloads of a world's buffer: the product's own, written in virtual time.

Consumes finished groups; produces their files, each a moment after it was asked for, in the process
of the buffer: what was not written when that dies is not there afterwards. Waits for nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from tests.simulation.loop import current_process
from tests.simulation.threads import running_loop

from ratchet.storage.payloads import Payloads


class _Later(Executor):
    """Calls in order, each some virtual time after it was submitted."""

    def __init__(self, seed: str, write_s: float) -> None:
        self._rng = random.Random(f"payloads/{seed}")
        self._write_s = write_s
        self._free_at = 0.0

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        loop = running_loop()
        begin_at = max(self._free_at, loop.now)
        self._free_at = begin_at + self._rng.expovariate(1 / self._write_s)
        loop.call_in(current_process.get(), self._free_at - loop.now, lambda: call(*args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing is left to stop."""


class WorldPayloads(Payloads):
    """Payloads on the disk of a world.

    Args:
        directory: where they are.
        seed: of how long each takes.
        write_s: the mean of that.
    """

    def __init__(self, directory: Path, seed: str, write_s: float) -> None:
        super().__init__(directory)
        self._executor.shutdown()
        self._executor = _Later(seed, write_s)
