"""One role as a process: `python -m ratchet.runtime.role`, started by the local supervisor.

Consumes one line of JSON (`RoleSpec`) on standard input, then commands on it: "stop" ends training
in order. Its end of file means that the launcher is gone, however it went, and ends this process at
once. The key of the mailboxes comes in that line: never in argv or the environment. Produces the
actor, its log file, and on standard output one line of JSON (`RoleOutcome`) when it ends.

Waits for the actor to end, or for SIGTERM. The process leaves through `os._exit`, so that a thread
that is stuck in a collective or in a user's code cannot hold it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from ratchet.actors.actor import LocalRef
from ratchet.actors.role import ORDERLY, REGISTRY, TAKEN
from ratchet.errors import ConfigError, RunFailed, StaleTerm, TaskError, UserError
from ratchet.messages import Down, Message, RunEnded, StopTraining
from ratchet.observability.logs import configure_logging, route_library_logs
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.compose import start_role
from ratchet.runtime.placement import RoleSpec
from ratchet.runtime.process_node import limits_of, process_node, role_system
from ratchet.runtime.reporter import Reporter
from ratchet.runtime.rundir import Links, same_address, write_links
from ratchet.tasks.registry import build_task
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.credentials import Credentials, load_tls
from ratchet.transport.mailbox.wire import SocketWire
from ratchet.types import RoleInfo

STOP_S: Final = 6.0
"""Seconds that a role has to end in order; then the process leaves."""


_USER_ERRORS: Final = frozenset(cls.__name__ for cls in (UserError, ConfigError, TaskError))


EXIT_CODES: Final = {"finished": 0, "stopped": 0, "failed": 1, "run_failed": 1, "user_error": 2}


class RoleOutcome(msgspec.Struct, frozen=True):
    """The last words of a role."""

    status: str
    """ "finished": the run is over | "run_failed": so it is, badly, but not through this role |
    "stopped": it was told to | "failed" | "user_error" """
    detail: str = ""
    replaced: bool = False
    """another process has taken the name, or the term: the run is the other's, and goes on"""

    def check(self) -> None:
        """Return if it ended in order.

        Raises:
            RunFailed: the run, or this role for good, failed; the text is the first cause.
            UserError: the role found something that only the user can mend.
        """
        if self.status == "user_error":
            raise UserError(self.detail)
        if self.status in {"failed", "run_failed"}:
            raise RunFailed(self.detail)


def outcome_of(reason: str, ended: RunEnded | None = None) -> RoleOutcome:
    """Turn the reason for which an actor ended, "stopped" or "ErrorClass: text", into an outcome.

    A model that an engine refuses while it loads is the user's to mend, and no restart helps. So
    are two processes with one name: the older one must not come back and fight for it.

    Args:
        reason: as a `Down` tells it.
        ended: what the process has heard of the end of the run.
    """
    if reason == ORDERLY and ended is not None:
        return RoleOutcome("run_failed" if ended.status == "failed" else "finished", ended.reason)
    if reason == ORDERLY:
        return RoleOutcome("stopped")
    if TAKEN in reason:
        detail = (
            f"{reason[reason.index(TAKEN) :]}, and this one ends: only one process of a run may"
            " have a name (ratchet launch --node-rank)"
        )
        return RoleOutcome("user_error", detail, replaced=True)
    kind, _, text = reason.partition(": ")
    if kind == StaleTerm.__name__:
        return RoleOutcome("user_error", f"{text}; this one ends", replaced=True)
    if kind in _USER_ERRORS:
        return RoleOutcome("user_error", text)
    return RoleOutcome("failed", reason)


class EndOfActor:
    """Watches an actor on behalf of a coroutine."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def tell(self, message: Message) -> None:
        """Take the `Down`."""
        if isinstance(message, Down) and not self.reason.done():
            self.reason.set_result(message.reason)


async def run_role(spec: RoleSpec) -> RoleOutcome:
    """Run the role until it ends or is told to."""
    run = RunDirectory(Path(spec.run_dir))
    config = spec.load_config() if spec.config else run.load_config()
    log = configure_logging(
        run.logs / f"{log_name(spec.role)}.jsonl",
        role=spec.role.name,
        run=spec.run_id,
        level=spec.level,
        wall_time=time.time,
    )
    system = role_system(config, spec.role.name, log)
    listen = Address.parse(spec.listen)
    node = process_node(
        system,
        spec.role.name,
        spec.role.incarnation,
        address=same_address(run, listen) if spec.role.kind == "registry" else listen,
        key=bytes.fromhex(spec.key),
        run_id=spec.run_id,
        wire=SocketWire(_credentials(spec)),
        limits=limits_of(config),
    )
    system.links = node.links
    system.book.learn(REGISTRY, spec.registry)
    log.info("role_starting", pid=os.getpid(), life=spec.role.incarnation)
    task = build_task(config.task, config.seed)
    await node.start()
    if spec.role.kind == "registry":
        links = Links(str(node.address), spec.run_id, spec.token_file, spec.tls)
        write_links(run, links)
    role = msgspec.structs.replace(spec.role, address=str(node.address))
    ref = start_role(
        system,
        role,
        config=config,
        run=run,
        run_id=spec.run_id,
        task=task,
        start_step=spec.start_step,
    )
    route_library_logs()  # torch and transformers have come in with handlers of their own
    freeze_imports()
    reporter = Reporter(system, role, every_s=config.runtime.heartbeat_s, open_asks=node.waits)
    reporter.start()
    reason = await _until_end(ref)
    reporter.stop()
    await node.stop(1.0)
    log.info("role_ended", reason=reason)
    return outcome_of(reason, system.run_ended)


def freeze_imports() -> None:
    """Leave what has been imported out of garbage collections. With torch and transformers a full
    one takes 0.1 s, in which a loop stands still, and all ranks of a trainer wait for one of them.
    """
    gc.collect()
    gc.freeze()


def _credentials(spec: RoleSpec) -> Credentials:
    tls = spec.tls
    contexts = None if tls is None else load_tls(tls.ca, tls.cert, tls.key)
    return Credentials(bytes.fromhex(spec.key), contexts)


async def _until_end(ref: LocalRef) -> str:
    loop = asyncio.get_running_loop()
    end = EndOfActor(ref.name)
    ref.watch(end)
    loop.add_signal_handler(signal.SIGTERM, _stop, ref)
    # a blocking read in a thread sees the launcher's death even while the loop is busy
    threading.Thread(target=_listen, args=(loop, ref), daemon=True, name="launcher").start()
    return await end.reason


def _stop(ref: LocalRef) -> None:
    threading.Timer(STOP_S, os._exit, args=(1,)).start()
    ref.stop(block=False)


def _listen(loop: asyncio.AbstractEventLoop, ref: LocalRef) -> None:
    for line in sys.stdin.buffer:
        if line.strip() == b"stop":
            loop.call_soon_threadsafe(ref.tell, StopTraining("asked to stop"))
    os._exit(1)


def log_name(role: RoleInfo) -> str:
    """Return the stem of the role's log files: ROLE-RANK."""
    return log_stem(role.name)


def log_stem(name: str) -> str:
    """Return the stem of the log files of the role of that name."""
    return name if "-" in name else f"{name}-0"


def outcome_of_work(work: Callable[[], RoleOutcome]) -> RoleOutcome:
    """Do the work of a process; what it raises is its outcome, for others to judge."""
    try:
        return work()
    except UserError as error:
        return RoleOutcome("user_error", str(error))
    except Exception as error:  # noqa: BLE001 - reported, and it ends the run
        traceback.print_exc()
        return RoleOutcome("failed", f"{type(error).__name__}: {error}")


def leave(outcome: RoleOutcome) -> NoReturn:
    """End the process, whatever its threads do."""
    sys.stderr.flush()
    os._exit(EXIT_CODES[outcome.status])


def main() -> None:
    """Read the spec, run the role, report, leave."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides
    report = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a user's code prints belongs with the errors, not in the report
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=RoleSpec)
    outcome = outcome_of_work(lambda: asyncio.run(run_role(spec)))
    report.write(msgspec.json.encode(outcome) + b"\n")
    report.flush()
    leave(outcome)


if __name__ == "__main__":
    main()
