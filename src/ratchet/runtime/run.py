"""`Run`: a training run as a Python object, and what `ratchet run` is made of.

Consumes a configuration, produces a run directory, an iterator over step metrics and a summary. The
roles run as processes, or with `in_process=True` in a background thread of this one. `wait` blocks
until the trainer has written the model; `stop` ends training in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import secrets
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

import msgspec

from ratchet.actors.role import REGISTRY
from ratchet.config import Config, load_config, parse_config
from ratchet.errors import ConfigError, RunFailed, UserError
from ratchet.observability.logs import Log, configure_logging
from ratchet.observability.metrics import follow_metrics
from ratchet.runtime.compose import role_names
from ratchet.runtime.local import run_in_process
from ratchet.runtime.placement import Placement, RankSpec
from ratchet.runtime.prepare import check_run
from ratchet.runtime.processes import LocalSupervisor
from ratchet.runtime.role import RoleOutcome
from ratchet.runtime.rundir import create_run_directory
from ratchet.tasks.base import Task
from ratchet.tasks.registry import RewardedTask
from ratchet.transport.mailbox.address import Address
from ratchet.types import Prompt

Reward = Callable[[Prompt, str], float]


class Run:
    """One training run.

    Args:
        config: a `Config`, plain data, or the path of a TOML file. directory: where the run lives;
        `runs/NAME` by default. It must not exist yet. reward: replaces the task's score. With
        processes it must be importable: a function at the top
            level of a module or script (whose own work is under `if __name__ == "__main__"`).
        overrides: "section.key=value", as on the command line.
        in_process: run everything in this process.

    Raises:
        UserError: if something cannot run; nothing was written.
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | Path,
        *,
        directory: str | Path | None = None,
        reward: Reward | None = None,
        overrides: Sequence[str] = (),
        in_process: bool = False,
    ) -> None:
        self.config = _resolve(config, overrides)
        self._in_process = in_process
        self._reward = reward if in_process else None
        if reward is not None and not in_process:
            self.config = _with_reward(self.config, reward)
        root = Path(directory) if directory is not None else Path("runs") / self.config.name
        self.run_id = uuid.uuid4().hex
        self._task = check_run(self.config)
        self.directory = create_run_directory(root.resolve(), self.config)
        self._outcome: RoleOutcome | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="ratchet-run", daemon=True)

    # --- as an object

    def start(self) -> Self:
        """Start the roles in the background, and return at once."""
        self._thread.start()
        return self

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Block until the run has ended; return its summary (`summary.json`).

        Raises:
            TimeoutError: if it has not ended within `timeout` seconds; it goes on.
            RunFailed: if the run failed; the text is the first cause.
            UserError: if a role found something that only the user can mend.
            RuntimeError: if it was not started.
        """
        self._check_started()
        if not self._ended.wait(timeout):
            msg = f"the run has not ended within {timeout} s"
            raise TimeoutError(msg)
        if self._error is not None:
            raise self._error
        return self.result()

    def stop(self, *, now: bool = False) -> None:
        """End training after the step in hand, and write the model; with `now`, just end."""
        event = self._kill if now else self._stop
        with self._lock:
            if self._loop is None:
                event.set()  # the loop is not there yet, and will find it set
            elif not self._ended.is_set():
                with contextlib.suppress(RuntimeError):  # the loop has just closed
                    self._loop.call_soon_threadsafe(event.set)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the metrics of each step, from the first, as they come; ends with the run.

        Raises:
            RuntimeError: if it was not started.
        """
        self._check_started()
        return follow_metrics(self.directory.metrics, until=self._ended.is_set)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop(now=exception is not None)
        self._ended.wait()

    def _check_started(self) -> None:
        if self._thread.ident is None:
            msg = "the run was not started: call start() first, or use it in a with statement"
            raise RuntimeError(msg)

    # --- as a coroutine, for a caller with a loop of its own

    async def run(self) -> RoleOutcome:
        """Run to the end on this loop."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
        log = configure_logging(
            self.directory.logs / "launcher-0.jsonl", role="launcher", run=self.run_id
        )
        if self._in_process:
            self._outcome = await run_in_process(
                self.config,
                self.directory,
                run_id=self.run_id,
                task=self._scored_task(),
                log=log,
                stop=self._stop,
                kill=self._kill,
            )
        else:
            self._outcome = await self._run_processes(log)
        log.info("run_ended", status=self._outcome.status, detail=self._outcome.detail)
        return self._outcome

    def request(self, *, now: bool) -> None:
        """Like `stop`, from the loop that runs it."""
        (self._kill if now else self._stop).set()

    def result(self) -> dict[str, Any]:
        """Return the summary of an ended run.

        Raises:
            RunFailed: if it failed.
            UserError: if a role refused the configuration.
        """
        outcome = self._outcome
        if outcome is None:
            msg = "the run has not ended"
            raise RuntimeError(msg)
        if outcome.status == "user_error":
            raise UserError(outcome.detail)
        if outcome.status == "failed":
            raise RunFailed(outcome.detail)
        if not self.directory.summary.exists():
            return {"status": "stopped", "reason": outcome.detail, "steps": None}
        summary: dict[str, Any] = msgspec.json.decode(self.directory.summary.read_bytes())
        return summary

    async def _run_processes(self, log: Log) -> RoleOutcome:
        with tempfile.TemporaryDirectory(prefix="ratchet-") as sockets:  # mode 0700
            placement = Placement(
                roles=tuple(role_names(self.config)),
                run_dir=self.directory.root,
                run_id=self.run_id,
                registry=Address("unix", f"{sockets}/{REGISTRY}.sock"),
                key=secrets.token_bytes(32),
                sockets=Path(sockets),
                ranks=_ranks(self.config),
            )
            supervisor = LocalSupervisor(self.config, self.directory, placement=placement, log=log)
            return await supervisor.run(self._stop, self._kill)

    def _scored_task(self) -> Task:
        return self._task if self._reward is None else RewardedTask(self._task, self._reward)

    def _main(self) -> None:
        try:
            asyncio.run(self.run())
        except BaseException as error:  # noqa: BLE001 - raised again by wait()
            self._error = error
        finally:
            self._ended.set()


def _ranks(config: Config) -> RankSpec | None:
    num_ranks = config.trainer.ranks_per_node
    return RankSpec(num_ranks) if num_ranks > 1 else None


def _resolve(config: Config | Mapping[str, Any] | str | Path, overrides: Sequence[str]) -> Config:
    if isinstance(config, str | Path):
        return load_config(Path(config), overrides)
    if overrides:
        msg = "overrides go with the path of a file; change the data itself instead"
        raise ConfigError(msg)
    return config if isinstance(config, Config) else parse_config(config)


def _with_reward(config: Config, reward: Reward) -> Config:
    """Name a function such that another process can import it."""
    module = inspect.getmodule(reward)
    name = getattr(reward, "__qualname__", "")
    if module is None or not name or "<" in name or "." in name:
        msg = (
            f"reward {reward!r} cannot be imported by another process: define it at the top level"
            " of a module or script, or use in_process=True"
        )
        raise ConfigError(msg)
    task = config.task.model_copy(update={"reward": f"{_source(module)}:{name}"})
    return config.model_copy(update={"task": task})


def _source(module: ModuleType) -> str:
    """Name a module such that a process with another import path finds it."""
    spec = module.__spec__
    if spec is not None and module.__package__:
        return spec.name  # also of `python -m package.module`, whose __name__ is "__main__"
    file = Path(getattr(module, "__file__", None) or "<none>")
    if file.is_file():
        return str(file.resolve())
    if module.__name__ != "__main__":
        return module.__name__
    msg = (
        "a reward that was typed into a notebook or an interactive session cannot be imported by"
        " another process: put it into a file, or use in_process=True"
    )
    raise ConfigError(msg)
