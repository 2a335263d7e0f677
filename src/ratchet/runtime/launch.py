"""`Launch`: one role of a run on this node, and what `ratchet launch` is made of.

Consumes a configuration and the address of the registry, produces the role as a supervised process,
a directory for its files, and one outcome. Everything that can be wrong is found before anything is
written.

Any role but the registry first visits the registry: it waits for it (`wait_s`), refuses to join
with another configuration, and learns which run it is. While the role runs, the launcher keeps that
link: when the registry has stopped in order the run is over, and when it is gone for `wait_s`
seconds, so is this launch; a role without a registry would otherwise be started for ever.

Rollouts come and go. The end of the launcher of a registry, a buffer or a trainer is the end of the
run, and it tells all others; but not that of a trainer that another has replaced, nor of a standby.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

from ratchet.actors.role import BUFFER, REGISTRY, TRAINER
from ratchet.errors import ConfigError
from ratchet.messages import EndRun, RunDescribed
from ratchet.observability.logs import Log, SilentLog, configure_logging
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.agreement import check_same
from ratchet.runtime.beside import beside
from ratchet.runtime.embed_link import Invitation
from ratchet.runtime.node_config import LaunchOptions, node_config, node_role
from ratchet.runtime.placement import Placement, TlsFiles
from ratchet.runtime.prepare import check_role
from ratchet.runtime.processes import LocalSupervisor
from ratchet.runtime.registry_link import Gone, end_run, meet_registry, until_gone
from ratchet.runtime.role import RoleOutcome
from ratchet.runtime.rundir import Links, host_run_directory, join_run_directory, read_links
from ratchet.runtime.standby import stand_by, with_newest_term
from ratchet.runtime.visitor import Visit, visit
from ratchet.status import EndStatus
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.credentials import open_credentials
from ratchet.transport.mailbox.wire import SocketWire
from ratchet.types import RoleKind

T = TypeVar("T")

_LAST_ROLE_S: Final = 6.0
"""The registry waits so long, after the end of the run, for the other roles to leave."""
_OVER_S: Final = 10.0
"""A role that lives on after its registry has stopped in order is given so long to end."""
_POLL_S: Final = 0.05


class Launch:
    """One role of a run on this node.

    Args:
        kind: of the role.
        config: path of the TOML file; the same on every node.
        options: what else the user has said.
        say: tells people how it goes, a line at a time.

    Raises:
        UserError: if something cannot run; nothing was written.
    """

    def __init__(
        self, kind: RoleKind, config: Path, options: LaunchOptions, say: Callable[[str], None]
    ) -> None:
        self.kind = kind
        self.config, self.registry = node_config(kind, config, options)
        self.name, self._ranks = node_role(kind, options, self.config.trainer.ranks_per_node)
        runtime = self.config.runtime
        self._credentials = open_credentials(runtime.token_file, runtime.tls)
        check_role(kind, self.config)
        if kind == "evaluator" and not self.config.num_evaluators:
            msg = (
                f"--eval starts a worker that only evaluates, and eval.every_steps ="
                f" {self.config.eval.every_steps} with eval.engines = {self.config.eval.engines!r}"
                ' has no use for it: set every_steps, and engines = "own"'
            )
            raise ConfigError(msg)
        root = options.directory or Path("runs") / self.config.name
        self.directory = RunDirectory(root.resolve())
        self._standby = options.standby
        self._wait_s = options.wait_s
        self._say = say
        self._ends_run = self.name in {REGISTRY, BUFFER, TRAINER}
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()

    def request_stop(self) -> None:
        """End the role in order; asked for again, at once. From the loop that runs it."""
        if self._stop.is_set():
            self._kill.set()
        self._stop.set()

    async def run(self) -> RoleOutcome:
        """Run the role until it, or the run, ends.

        Raises:
            UserError: if the registry does not let this node in, or its directory is another run's.
            RunFailed: if the registry is not there.
        """
        if self.kind == "registry":
            run_id, self.registry = host_run_directory(self.directory, self.config, self.registry)
        else:
            run_id = await self._join()
            if not run_id:
                return RoleOutcome("stopped", "interrupted")
        log = configure_logging(
            self.directory.logs / f"launcher-{self.name}.jsonl", role="launcher", run=run_id
        )
        outcome = await self._take_turns(run_id, log)
        log.info("launch_ended", status=outcome.status, detail=outcome.detail)
        return outcome

    # --- joining

    async def _join(self) -> str:
        """Find the run and make our directory; return its id, or nothing if told to stop."""
        described = await self._unless_stopped(self._find())
        if described is None:
            return ""
        check_same(self.config, described.config, whose=f"the run at {self.registry}")
        links = self._links(described.run_id)
        is_trained = described.status.is_trained
        join_run_directory(
            self.directory, self.config, links, kind=self.kind, is_trained=is_trained
        )
        self._say(
            f"{self.name} joins run {described.run_id} at {self.registry};"
            f" its files: {self.directory.root}"
        )
        return described.run_id

    async def _find(self) -> RunDescribed:
        async with visit(
            self.registry, key=self._credentials.key, log=SilentLog(), wire=self._wire()
        ) as link:
            return await meet_registry(
                link, where=str(self.registry), wait_s=self._wait_s, say=self._say
            )

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        working = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return await working if working.done() else None
        finally:
            stopped.cancel()
            working.cancel()
            await asyncio.wait({working})

    def _links(self, run_id: str) -> Links:
        return Links(str(self.registry), run_id, self._token_file(), self._tls())

    def _token_file(self) -> str | None:
        path = self.config.runtime.token_file
        return None if path is None else str(Path(path).resolve())

    def _tls(self) -> TlsFiles | None:
        files = self.config.runtime.tls
        if files is None:
            return None
        return TlsFiles(*(str(Path(path).resolve()) for path in (files.ca, files.cert, files.key)))

    def _wire(self) -> SocketWire:
        return SocketWire(self._credentials)

    # --- running

    async def _take_turns(self, run_id: str, log: Log) -> RoleOutcome:
        """Run the role; as a standby each time when its place is vacant, until it has had it for
        good.
        """
        while self._standby:
            self._say(f"{self.name} stands by")
            before = await self._unless_stopped(self._vacancy(run_id, log))
            if before is None:
                return RoleOutcome("stopped", "interrupted")
            if isinstance(before, RoleOutcome):
                return before
            self._say(f"{self.name} takes over: {before}")
            outcome = await self._supervise(run_id, log)
            if not outcome.replaced:
                return outcome
            self._say(f"{self.name}: {outcome.detail}")
        return await self._supervise(run_id, log)

    async def _vacancy(self, run_id: str, log: Log) -> RoleOutcome | str:
        invitation = Invitation(
            self.registry, self._credentials, host=self.config.runtime.host, directory=None
        )
        return await stand_by(self.config, invitation, run_id, log)

    async def _supervise(self, run_id: str, log: Log) -> RoleOutcome:
        supervisor = LocalSupervisor(
            self.config, self.directory, placement=self._placement(run_id), log=log
        )
        running = asyncio.create_task(supervisor.run(asyncio.Event(), self._kill))
        registry = await self._registry_up(running)
        if registry is None:
            return await running
        async with visit(
            registry, key=self._credentials.key, log=log, wire=self._wire(), run_id=run_id
        ) as link:
            async with (
                beside(self._until_gone(link, run_id), failed=self._kill.set) as (gone,),
                beside(
                    self._stop_in_order(link, running),
                    self._kill_after(gone),
                    failed=self._kill.set,
                ) as (_, killing),
            ):
                outcome = await running
                await self._tell_end(link, outcome, gone)
            if outcome.replaced and self.kind == "trainer":
                return await with_newest_term(outcome, link)
            if outcome.status == "stopped" and killing.done() and not killing.cancelled():
                over, reason = gone.result()
                return RoleOutcome("finished" if over else "failed", reason)
            return outcome

    def _placement(self, run_id: str) -> Placement:
        return Placement(
            roles=((self.kind, self.name),),
            run_dir=self.directory.root,
            run_id=run_id,
            registry=self.registry,
            key=self._credentials.key,
            host=self.config.runtime.host,
            config=self.config.to_toml(),
            token_file=Path(path) if (path := self._token_file()) is not None else None,
            tls=self._tls(),
            ranks=self._ranks,
        )

    async def _registry_up(self, running: asyncio.Task[RoleOutcome]) -> Address | None:
        """Return where the registry is; None if it is our own, and has ended before it listens."""
        if self.kind != "registry":
            return self.registry
        while not running.done():
            links = read_links(self.directory)
            if links is not None:
                self._say(f"registry listens at {links.registry}")
                return Address.parse(links.registry)
            if self._stop.is_set():
                self._kill.set()
            await asyncio.sleep(_POLL_S)  # nothing tells another process's files
        return None

    async def _stop_in_order(self, link: Visit, running: asyncio.Task[RoleOutcome]) -> None:
        await self._stop.wait()
        if self._ends_run:
            link.end_run(self._end("stopped", f"the launcher of {self.name} was told to stop"))
        if self.kind == "registry":  # it tells all others, and ends when they have
            await asyncio.wait({running}, timeout=_LAST_ROLE_S)
        self._kill.set()

    def _end(self, status: EndStatus, reason: str) -> EndRun:
        return EndRun(f"launcher of {self.name}", status, reason)

    async def _until_gone(self, link: Visit, run_id: str) -> Gone:
        if self.kind == "registry":
            await asyncio.Event().wait()  # its own end is told by its process
        return await until_gone(link, run_id=run_id, wait_s=self._wait_s)

    async def _kill_after(self, gone: asyncio.Task[Gone]) -> None:
        """End the role after the end of the registry, if it does not end itself."""
        await asyncio.wait({gone})
        if gone.result().over:
            await asyncio.sleep(_OVER_S)
        self._kill.set()

    async def _tell_end(self, link: Visit, outcome: RoleOutcome, gone: asyncio.Task[Gone]) -> None:
        """End the run with the role. If a registry that is away did not hear, all would wait on."""
        goes_on = self.kind == "registry" or not self._ends_run or outcome.replaced
        if goes_on or outcome.status in {"stopped", "run_failed"}:  # or the registry has told it
            return
        detail = outcome.detail
        cause = detail if detail.startswith(self.name) else f"{self.name}: {detail}"
        end = self._end("finished" if outcome.status == "finished" else "failed", cause)
        telling = asyncio.create_task(end_run(link, end, wait_s=self._wait_s))
        told = asyncio.wait({telling, gone}, return_when=asyncio.FIRST_COMPLETED)
        await self._unless_stopped(told)
        telling.cancel()

    def result(self, outcome: RoleOutcome) -> str:
        """Return what there is to say of an end in order.

        Raises:
            RunFailed: the run, or this role for good, failed; the text is the first cause.
            UserError: the role found something that only the user can mend.
        """
        outcome.check()
        how = "the run has ended" if outcome.status == "finished" else "stopped"
        return f"{self.name}: {how}" + (f": {outcome.detail}" if outcome.detail else "")
