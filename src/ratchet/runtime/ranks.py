"""A trainer of several ranks as a process: `python -m ratchet.runtime.ranks`, which the launcher
starts in the place of `ratchet.runtime.role`. It runs torchrun's elastic agent.

Consumes what a role consumes: one line of JSON (`RoleSpec`) on standard input, then commands, which
go on to rank 0, whose process is the role; on the nodes of a trainer without rank 0 a "stop" needs
no one to hear it. Produces the ranks of this node (`ratchet.runtime.rank`) and one line of JSON
(`RoleOutcome`): rank 0's own, or the first cause if a rank failed.

Waits, in torch's agent, for the ranks to end or for one to fail, looking every `_POLL_S`. What
unblocks it:

* A rank fails or is killed: the agent ends the others, by SIGTERM, which leaves each of them
  `role.STOP_S`.
* SIGTERM: the same. Rank 0 stops as a role does, and the others with it, as it closes its backend.
* The end of standard input: the launcher is gone, and this process leaves at once.
* However this process leaves, also by a kill -9, the kernel kills the ranks. (After a kill -9 the
  private directory stays behind until the launcher removes that of its sockets, where it is if
  there is one; nothing in it is secret.)

The agent restarts no rank: each launcher starts its node of the trainer again as a whole, and they
meet as a new gang (`rendezvous.py`), which goes on from the newest checkpoint. Where rank 0 says
that another life would end in the same way, its word ends the other nodes for good.

On one node nothing but gloo's and NCCL's own connections listens, on the loopback interface. What
several nodes expose is said in `rendezvous.py`.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import msgspec

from ratchet.observability.logs import BoundLog, configure_logging, route_library_logs
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.gang import FOLDER, Death, LastWords, RankFiles, first_cause
from ratchet.runtime.placement import RankSpec, RoleSpec
from ratchet.runtime.role import STOP_S, RoleOutcome, leave, log_name, outcome_of_work
from ratchet.runtime.tree import is_last_word
from ratchet.transport.mailbox.address import Address

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from ratchet.runtime.rendezvous import FixedRendezvous

_POLL_S: Final = 0.1
_HEARSAY_S: Final = 2.0
"""A node whose ranks failed waits so long to hear that another node failed first."""


class Gang:
    """The ranks of this node."""

    def __init__(self, spec: RoleSpec, ranks: RankSpec, folder: Path, log: BoundLog) -> None:
        self._spec = spec
        self._ranks = ranks
        self._folder = folder
        self._log = log
        self._files = [RankFiles(folder, number) for number in range(ranks.ranks_per_node)]
        self._first = ranks.node_rank * ranks.ranks_per_node
        run = RunDirectory(Path(spec.run_dir))
        self._err_file = str(run.logs / f"{log_name(spec.role)}.err")

    def prepare(self) -> None:
        """Make the way to each rank, with its spec in it; only rank 0 is told the secrets."""
        for number, files in enumerate(self._files):
            files.open()
            follower = msgspec.structs.replace(self._spec, key="", token_file=None, tls=None)
            spec = follower if self._first + number else self._spec
            files.tell(msgspec.json.encode(spec))

    def forward(self, commands: IO[bytes]) -> None:
        """Pass commands on to rank 0; leave with the launcher."""
        for line in commands:
            if self._first == 0:
                self._files[0].tell(line.rstrip())
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(1)

    def run(self) -> RoleOutcome:
        """Run the agent until all ranks have ended."""
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        from ratchet.runtime.rendezvous import FixedRendezvous, NodeLost

        rendezvous = FixedRendezvous(self._ranks, self._spec.run_id)
        try:
            _launch(self._spec, self._ranks, rendezvous)
        except ChildFailedError as failed:
            return self._failed(self._first_cause(failed), rendezvous)
        except (SignalException, _Terminated):
            rendezvous.fail("it was told to stop")
            return self._said().get(0, _STOPPED).outcome
        except NodeLost as lost:
            rendezvous.fail(str(lost))
            return _end_of_other(str(lost))
        except Exception as error:
            rendezvous.fail(f"{type(error).__name__}: {error}")
            raise
        return self._said().get(self._first, _FINISHED).outcome

    def _first_cause(self, failed: ChildFailedError) -> RoleOutcome:
        deaths = [Death(rank, failure.exitcode) for rank, failure in failed.failures.items()]
        words = self._said()
        for rank, code in deaths:
            said = words[rank].outcome.detail if rank in words else None
            self._log.error("rank_failed", rank=rank, exit_code=code, detail=said)
        return first_cause(deaths, words, self._err_file)

    def _failed(self, outcome: RoleOutcome, rendezvous: FixedRendezvous) -> RoleOutcome:
        """Tell the other nodes; return what failed on another one, if ranks here missed its."""
        from ratchet.backends.training.channel import LOST_RANK

        if LOST_RANK not in outcome.detail:
            for_good = outcome.status in {"user_error", "run_failed"} or is_last_word(outcome)
            rendezvous.fail(outcome.detail, for_good=for_good)
            return outcome
        # a new gang has that rank again: this is no last word, even if rank 0 says it
        outcome = RoleOutcome("failed", f"{self._spec.role.name}: {outcome.detail}")
        rendezvous.fail(outcome.detail)
        heard = rendezvous.hear(_HEARSAY_S) if self._ranks.num_nodes > 1 else None
        return outcome if heard is None else _end_of_other(heard)

    def _said(self) -> dict[int, LastWords]:
        words = {self._first + n: files.last_words() for n, files in enumerate(self._files)}
        return {rank: said for rank, said in words.items() if said is not None}


def _end_of_other(words: str) -> RoleOutcome:
    """Return the end of this node because of another one."""
    from ratchet.runtime.rendezvous import FOR_GOOD

    return RoleOutcome("run_failed" if FOR_GOOD in words else "failed", words)


_STOPPED: Final = LastWords(RoleOutcome("stopped"), 0.0)
_FINISHED: Final = LastWords(RoleOutcome("finished"), 0.0)


def _launch(spec: RoleSpec, ranks: RankSpec, rendezvous: FixedRendezvous) -> None:
    """Run torch's agent.

    Raises:
        ChildFailedError: if a rank failed.
        SignalException: on SIGTERM.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    backend = rendezvous.get_backend()
    rendezvous_handler_registry.register(backend, lambda _: rendezvous)
    config = LaunchConfig(
        min_nodes=ranks.num_nodes,
        max_nodes=ranks.num_nodes,
        nproc_per_node=ranks.ranks_per_node,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # ranks write where this process does
        run_id=spec.run_id,
        role=spec.role.name,
        rdzv_endpoint=ranks.rendezvous,
        rdzv_backend=backend,
        max_restarts=0,
        monitor_interval=_POLL_S,
        signals_to_handle="SIGTERM",
        shutdown_timeout=int(STOP_S),
    )
    route_library_logs()
    try:
        elastic_launch(config, sys.executable)("-m", "ratchet.runtime.rank")
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # all ranks are gone, and this leaves too


class _Terminated(BaseException):
    """SIGTERM before the agent listens to it."""


def _terminate(_number: int, _frame: object) -> None:
    raise _Terminated


def _run(spec: RoleSpec, commands: IO[bytes]) -> RoleOutcome:
    ranks = spec.ranks or RankSpec(1)
    run = RunDirectory(Path(spec.run_dir))
    name = f"{log_name(spec.role)}.agent{ranks.node_rank}"
    log = configure_logging(
        run.logs / f"{name}.jsonl", role=name, run=spec.run_id, level=spec.level
    )
    listen = Address.parse(spec.listen)
    inside = Path(listen.host).parent if listen.kind == "unix" else None
    folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=inside))  # mode 0700
    os.environ[FOLDER] = str(folder)
    try:
        gang = Gang(spec, ranks, folder, log)
        gang.prepare()
        threading.Thread(target=gang.forward, args=(commands,), daemon=True).start()
        log.info("agent_started", num_ranks=ranks.ranks_per_node, num_nodes=ranks.num_nodes)
        outcome = gang.run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    log.info("agent_ended", status=outcome.status, detail=outcome.detail)
    return outcome


def main() -> None:
    """Read the spec, run the ranks, report, leave."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides
    signal.signal(signal.SIGTERM, _terminate)
    report = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    commands = os.fdopen(os.dup(0), "rb")
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - what the ranks inherit
        os.dup2(nothing.fileno(), 0)
    try:
        spec = msgspec.json.decode(commands.readline(), type=RoleSpec)
        outcome = outcome_of_work(lambda: _run(spec, commands))
    except _Terminated:
        outcome = RoleOutcome("stopped")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # its last words are still to come
    report.write(msgspec.json.encode(outcome) + b"\n")
    report.flush()
    leave(outcome)


if __name__ == "__main__":
    main()
