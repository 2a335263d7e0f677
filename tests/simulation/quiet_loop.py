"""An event loop that stops when nothing is ready, and whose time moves when it is told."""

from __future__ import annotations

import asyncio

from tests.simulation.loop import VirtualLoop


class QuietLoop(VirtualLoop):
    """Stops when nothing is ready, instead of letting time pass."""

    _jumps = False

    def settle(self) -> None:
        """Run what is ready, and what that makes ready."""
        if self._ready:
            self.run_forever()

    def jump(self) -> bool:
        """Go to the next timer; False if there is none."""
        self._jumps = any(not timer.cancelled() for timer in self._scheduled)  # type: ignore[attr-defined]
        jumps = self._jumps
        if jumps:
            self.run_forever()
        return jumps

    def drop(self) -> None:
        """Cancel what is left, and close."""
        while tasks := asyncio.all_tasks(self):  # some wait again while they are cancelled
            for task in tasks:
                task.cancel()
            self.settle()
        self.close()

    def _run_once(self) -> None:
        if self._ready or self._jumps:
            self._jumps = False
            super()._run_once()
        else:
            self.stop()
