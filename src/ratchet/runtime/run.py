"""`Run`: a training run as a Python object, and what `ratchet run` is made of.

Consumes a configuration, produces a run directory, an iterator over step metrics and a summary. The
roles run as processes, or with `in_process=True` in a background thread of this one. `wait` blocks
until the trainer has written the model; `stop` ends training in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from ratchet.config import Config, load_config, parse_config
from ratchet.errors import ConfigError
from ratchet.observability.logs import Log, configure_logging
from ratchet.observability.metrics import follow_metrics
from ratchet.runtime.compose import chosen_roles
from ratchet.runtime.local import run_in_process
from ratchet.runtime.one_host import run_processes
from ratchet.runtime.prepare import check_run, with_fingerprint
from ratchet.runtime.resume import Resume, Resumption, find_config, resume_run
from ratchet.runtime.reward import Reward, with_reward
from ratchet.runtime.role import RoleOutcome
from ratchet.runtime.rundir import create_run_directory
from ratchet.types import RoleKind


class Run:
    """One training run.

    Args:
        config: a `Config`, plain data, or the path of a TOML file.
        directory: where the run lives; `runs/NAME` by default. It must not exist yet.
        reward: replaces the task's score. With processes it must be importable: a function at the
            top level of a module or script (whose own work is under `if __name__ == "__main__"`).
        overrides: "section.key=value", as on the command line.
        in_process: run everything in this process.
        resume: go on with the run in the directory, which has ended; see also `Run.resume`.
        roles: the kinds of roles to start, all by default. Without the trainer, say, a training
            loop of your own joins the rest (`ratchet.join`), and its end, or `stop`, is the run's.

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
        roles: Collection[RoleKind] | None = None,
        resume: Resume | None = None,
    ) -> None:
        self.config = _resolve(config, overrides)
        self._roles = chosen_roles(self.config, roles, in_process=in_process)
        self._in_process = in_process
        if reward is not None and not in_process:
            self.config = with_reward(self.config, reward)
        elif reward is not None and self.config.task.reward_isolation == "process":
            msg = (
                'task.reward_isolation = "process": no process can import the reward that is given'
                ' to a run with in_process=True; name it in task.reward, or use "auto" or "thread"'
            )
            raise ConfigError(msg)
        root = Path(directory) if directory is not None else Path("runs") / self.config.name
        self._task = check_run(self.config, reward if in_process else None)
        self.config = with_fingerprint(self.config, self._task)
        self._resumed: Resumption | None = None
        if resume is None:
            self.run_id = uuid.uuid4().hex
            self.directory = create_run_directory(root.resolve(), self.config)
        else:
            self._resumed = resume_run(root.resolve(), self.config, resume.step)
            self.directory, self.run_id = self._resumed.run, self._resumed.run_id
        self._outcome: RoleOutcome | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="ratchet-run", daemon=True)

    @classmethod
    def resume(
        cls,
        directory: str | Path,
        *,
        step: int | None = None,
        overrides: Sequence[str] = (),
        **options: Any,
    ) -> Self:
        """Return a run that goes on where the one in a directory has ended, however it did.

        Args:
            directory: of the run; its `config.toml` is the configuration.
            step: of the checkpoint to go on from; by default the newest.
            overrides: "section.key=value"; not of the model, the task, the seed or the group size.
            options: `reward`, `in_process` and `roles`, as for a new run.

        Raises:
            UserError: if the run cannot go on like that; nothing was changed.
        """
        root = Path(directory)
        config = find_config(root)
        return cls(config, directory=root, overrides=overrides, resume=Resume(step), **options)

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
        if self._resumed is not None:
            self._tell_resumption(self._resumed, log)
        if self._in_process:
            run_all = partial(run_in_process, task=self._task)
        else:
            run_all = partial(run_processes, roles=self._roles)
        self._outcome = await run_all(
            self.config,
            self.directory,
            run_id=self.run_id,
            log=log,
            stop=self._stop,
            kill=self._kill,
            start_step=None if self._resumed is None else self._resumed.step,
        )
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
        outcome.check()
        if not self.directory.summary.exists():
            return {"status": "stopped", "reason": outcome.detail, "steps": None}
        summary: dict[str, Any] = msgspec.json.decode(self.directory.summary.read_bytes())
        return summary

    @staticmethod
    def _tell_resumption(resumed: Resumption, log: Log) -> None:
        log.info("run_resumed", step=resumed.step)
        for field, now, before in resumed.changes:
            log.warning("config_changed", field=field, now=now, before=before)

    def _main(self) -> None:
        try:
            asyncio.run(self.run())
        except BaseException as error:  # noqa: BLE001 - raised again by wait()
            self._error = error
        finally:
            self._ended.set()


def _resolve(config: Config | Mapping[str, Any] | str | Path, overrides: Sequence[str]) -> Config:
    if isinstance(config, str | Path):
        return load_config(Path(config), overrides)
    if overrides:
        msg = "overrides go with the path of a file; change the data itself instead"
        raise ConfigError(msg)
    return config if isinstance(config, Config) else parse_config(config)
