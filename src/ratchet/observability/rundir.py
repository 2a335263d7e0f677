"""The files of one run, and who writes each of them: the one place that knows their names.

Consumes the path of a run directory, produces the paths in it; waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ratchet.config import Config, load_config
from ratchet.errors import UserError

RUNS: Final = Path("runs")
"""Where runs are, unless their user says otherwise."""


@dataclass(frozen=True)
class RunDirectory:
    """Names of the files of a run."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved configuration; written once, before anything starts."""
        return self.root / "config.toml"

    @property
    def links(self) -> Path:
        """How to reach the run while it goes on, by the registry."""
        return self.root / "links.json"

    @property
    def logs(self) -> Path:
        """One ROLE-RANK.jsonl for each process, and its standard error beside it."""
        return self.root / "logs"

    @property
    def metrics(self) -> Path:
        """One line a step, by the trainer."""
        return self.root / "metrics.jsonl"

    @property
    def evals(self) -> Path:
        """One line an evaluation, by the trainer."""
        return self.root / "evals.jsonl"

    @property
    def summary(self) -> Path:
        """How the run ended, by the trainer."""
        return self.root / "summary.json"

    @property
    def versions(self) -> Path:
        """Every policy version, by the registry."""
        return self.root / "versions.sqlite"

    @property
    def ledger(self) -> Path:
        """Every prompt group, by the buffer."""
        return self.root / "ledger.sqlite"

    @property
    def payloads(self) -> Path:
        """What finished groups consist of, until a checkpoint has them, by the buffer."""
        return self.root / "payloads"

    @property
    def base(self) -> Path:
        """The model that the run starts from, when it was built from `model.build`."""
        return self.root / "base"

    @property
    def checkpoints(self) -> Path:
        """What training goes on from, by the trainer."""
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        """The trained model, by the trainer, at the end."""
        return self.root / "model"

    def load_config(self) -> Config:
        """Read the resolved configuration back."""
        return load_config(self.config)


def find_run(directory: Path | None) -> RunDirectory:
    """Return the run in a directory; of None the newest one in `runs/`.

    Raises:
        UserError: there is none.
    """
    if directory is None:
        directory = _newest(RUNS)
    elif not directory.exists():
        msg = f"{directory} does not exist; give the directory of a run, such as {RUNS}/NAME"
        raise UserError(msg)
    run = RunDirectory(directory)
    if not run.logs.is_dir():
        msg = f"{directory} is not a run directory: it has no logs/; runs are in {RUNS}/ by default"
        raise UserError(msg)
    return run


def _newest(runs: Path) -> Path:
    entries = runs.iterdir() if runs.is_dir() else ()
    found = [entry for entry in entries if RunDirectory(entry).logs.is_dir()]
    if not found:
        msg = f"there is no run in {runs}/ here; give the directory of a run"
        raise UserError(msg)
    return max(found, key=lambda entry: RunDirectory(entry).logs.stat().st_mtime)
