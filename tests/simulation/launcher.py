"""The launchers of a world: the product's tree of supervisors as it is, over simulated processes.

Consumes the ends of the worker processes that it has started; produces their next lives, and its
own end. Waits for what `ratchet.runtime.tree` waits for. It runs in a process of its own, by the
clock of that process, and no fault strikes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from ratchet.actors.restarts import End
from ratchet.actors.role import REGISTRY
from ratchet.messages import EndRun
from ratchet.runtime.registry_link import end_run
from ratchet.runtime.role import RoleOutcome, outcome_of
from ratchet.runtime.tree import build_tree, role_end, run_tree
from ratchet.runtime.visitor import Visit
from ratchet.transport.mailbox.address import Address
from ratchet.types import RoleKind

if TYPE_CHECKING:
    from tests.simulation.lives import Trainer, Worker
    from tests.simulation.sessions import Host, Network

    from ratchet.config import Config

KILLED = "killed"
"""The reason of an end by SIGKILL."""

StartWorker = Callable[[str], "Worker | Trainer"]


def _kind(name: str) -> RoleKind:
    kinds: tuple[RoleKind, ...] = ("evaluator", "trainer")
    return next((kind for kind in kinds if name.startswith(kind)), "rollout")


class WorkerProcess:
    """A worker as its launcher has it: `ratchet.actors.supervisor.Child`."""

    def __init__(self, name: str, launcher: Launcher, start: StartWorker) -> None:
        self.name = name
        self._launcher = launcher
        self._start = start

    @property
    def _life(self) -> Worker | Trainer:
        return next(life for life in reversed(self._launcher.lives) if life.name == self.name)

    async def start(self) -> None:
        """Begin a new life."""
        self._launcher.lives.append(self._start(self.name))

    async def ended(self) -> End:
        """Wait for the end of the process, which the kernel tells at once."""
        life = self._life
        await life.end.event.wait()
        if life.end.reason == KILLED:
            outcome = RoleOutcome("failed", f"{self.name} died of signal 9")
        else:
            outcome = outcome_of(life.end.reason, life.host.system.run_ended)
        return role_end(self.name, outcome)

    async def stop(self) -> None:
        """Send SIGTERM, as a role understands it, and wait."""
        loop, life = self._launcher.network.loop, self._life
        if not loop.ending:
            loop.call_in(life.host.process, 0.0, lambda: life.ref.stop(block=False))
            await life.end.event.wait()

    async def kill(self) -> None:
        """Send SIGKILL."""
        if not self._launcher.network.loop.ending:
            self._life.end.kill()


class Launcher:
    """One launcher and its process.

    Args:
        network: where its process lives.
        name: of the process.
        workers: names of those that it supervises.
        config: its `runtime` holds the rules.
        start: begins one life of a worker.
        whose: "run": when it gives up it ends the run, as `ratchet run` does; "workers": it leaves
            the run to others, as `ratchet launch rollout` does.
    """

    def __init__(
        self,
        network: Network,
        name: str,
        workers: Sequence[str],
        *,
        config: Config,
        start: StartWorker,
        whose: Literal["run", "workers"],
    ) -> None:
        self.network = network
        self.name = name
        self.workers = tuple(workers)
        self.whose = whose
        self.lives: list[Worker | Trainer] = []
        """of all its workers, oldest first"""
        self.outcome: RoleOutcome | None = None
        """None as long as it runs"""
        self.ended_at: float | None = None
        self.host: Host = network.start(name, config.runtime.ask_timeout_s)
        self._config = config
        self._start = start
        self._end: EndRun | None = None
        self.task: asyncio.Task[None] = self.host.process.call(
            lambda: asyncio.ensure_future(self._run())
        )

    @property
    def goes_on(self) -> bool:
        """It has neither ended nor died."""
        return self.outcome is None and self.host.lives

    def lose_node(self) -> None:
        """Die with all workers: the machine is gone."""
        self.ended_at = self.network.loop.now
        self.network.kill(self.host)
        for life in self.lives:
            life.end.kill()

    async def _run(self) -> None:
        root = build_tree(
            [(_kind(name), WorkerProcess(name, self, self._start)) for name in self.workers],
            self._config,
            log=self.host.log,
            on_escalation=self._escalated if self.whose == "run" else None,
        )
        never = asyncio.Event()
        self.outcome = await run_tree(root, stop=never, kill=never, stop_training=lambda: False)
        self.ended_at = self.network.loop.now
        if self._end is not None:
            await self._tell(self._end)
        await self.network.leave(self.host, 4 * self.network.limits.hello_s)

    async def _escalated(self, cause: str) -> None:
        self._end = EndRun(self.name, "failed", cause)
        self.host.system.ref(REGISTRY).tell(self._end)

    async def _tell(self, end: EndRun) -> None:
        host = self.host
        link = Visit(Address("unix", REGISTRY), host.system, host.node, cast("Any", None))
        await end_run(link, end, wait_s=host.system.registry_wait_s)
