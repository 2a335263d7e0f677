"""Evaluation of an exported model, without a run: `ratchet eval`.

Consumes a run directory or a Hugging Face directory and a configuration; produces an
`OfflineEvaluation`. Engine, scoring, prompts and seeds are those of a run, and so are the results.
Waits for the engine and the rewards; there is no deadline but those of the rewards.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ratchet.actors.evaluation import Evaluation, evaluation_of
from ratchet.actors.evaluation_share import EvaluationShares
from ratchet.actors.generation import Generator
from ratchet.config import Config, load_config
from ratchet.errors import ConfigError, RunFailed, UserError
from ratchet.imports import import_chosen
from ratchet.messages import EvaluatePolicy
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.compose import ENGINES
from ratchet.runtime.prepare import check_run
from ratchet.runtime.scoring import open_scorer
from ratchet.storage.versions import read_versions
from ratchet.tasks.base import Task
from ratchet.types import PolicyVersion, VersionRecord


class OfflineEvaluation(msgspec.Struct, frozen=True):
    """What `ratchet eval` prints."""

    model: str
    version: PolicyVersion | None
    """the newest live one of the run that exported the model, if that is known"""
    digest: str | None
    step: int | None
    task: str
    accuracy: float
    """mean reward over the prompts that could be scored"""
    num_prompts: int
    num_failed: int
    samples: int
    temperature: float
    seconds: float
    tasks: dict[str, dict[str, float]] = {}
    """of several tasks, `accuracy` and `num_prompts` of each"""
    first_failure: str | None = None


class ModelToEvaluate(msgspec.Struct, frozen=True):
    """Where a model is, and which version it is of a run, if it is one."""

    directory: Path
    record: VersionRecord | None
    config: Config
    """its `[model]` is that directory"""


def find_model(path: Path, config: Path | None, overrides: Sequence[str]) -> ModelToEvaluate:
    """Find the model in a directory: of a run, or of Hugging Face's layout.

    Args:
        path: the directory.
        config: a TOML file; that of the run by default.
        overrides: "section.key=value".

    Raises:
        UserError: if there is no model, or no configuration.
    """
    if not path.is_dir():
        msg = f"{path} is not a directory; give a run directory or a Hugging Face model directory"
        raise UserError(msg)
    path = path.resolve()
    exported = path.name == "model" and RunDirectory(path.parent).config.is_file()
    run = RunDirectory(path.parent if exported else path)
    of_run = run.config.is_file()
    directory = run.model if of_run else path
    if of_run and not directory.is_dir():
        msg = f"{run.root} has no model yet: a run writes it at its end, as {directory}"
        raise UserError(msg)
    if not any((directory / name).is_file() for name in ("config.json", "adapter_config.json")):
        msg = f"{directory} holds no config.json; give a local Hugging Face model directory"
        raise UserError(msg)
    if config is None and not of_run:
        msg = f"{path} is not of a run: give --config FILE, which names the task and how to sample"
        raise UserError(msg)
    loaded = load_config(config or run.config, overrides)
    return ModelToEvaluate(directory, _newest(run) if of_run else None, loaded)


async def evaluate_offline(model: ModelToEvaluate) -> OfflineEvaluation:
    """Score the held-out prompts of the configuration's task; all of them if `eval.num_prompts` is
    0.

    Raises:
        UserError: if the model, the task or its held-out prompts are not there.
        RunFailed: if no prompt could be scored.
    """
    began = time.monotonic()
    failures = _Failures()
    with _whole_model(model) as directory:
        config = _with_model(model.config, directory)
        task = check_run(config)
        evaluation = await _evaluate(config, directory, task, failures)
    if evaluation.accuracy is None:
        msg = f"no prompt could be scored; the first failure: {failures.first}"
        raise RunFailed(msg)
    line = evaluation.line()
    record = model.record
    return OfflineEvaluation(
        model=str(model.directory),
        version=None if record is None else record.version,
        digest=None if record is None else record.digest,
        step=None if record is None else record.step,
        task=config.task.name,
        accuracy=evaluation.accuracy,
        num_prompts=evaluation.num_prompts,
        num_failed=evaluation.num_failed,
        samples=config.eval.samples,
        temperature=config.eval.temperature,
        seconds=round(time.monotonic() - began, 3),
        tasks=line.get("tasks", {}),
        first_failure=failures.first,
    )


async def _evaluate(config: Config, directory: Path, task: Task, failures: _Failures) -> Evaluation:
    prompts = task.prompts("eval")[: config.eval.num_prompts or None]
    if not prompts:
        msg = f"task {config.task.name!r} holds no prompts out; hold some out in task.args"
        raise ConfigError(msg)
    engine = import_chosen("rollout.backend", config.rollout.backend, ENGINES)(config, directory)
    scorer = open_scorer(config, task, in_process=False, log=failures)
    try:
        await engine.start()
        await engine.stamp(0)
        shares = EvaluationShares(
            Generator(config, engine, scorer), prompts, timeout_s=None, log=failures
        )
        sampling = config.eval.samples, config.eval.temperature
        reply = await shares.run(EvaluatePolicy(0, 0, len(prompts), *sampling), engine.version)
    finally:
        scorer.close()
        await engine.close()
    return evaluation_of(0, [reply], len(prompts))


class _Failures:
    """A log that keeps the first failure."""

    def __init__(self) -> None:
        self.first: str | None = None

    def warning(self, event: str, **fields: Any) -> None:
        """Keep it, if it is the first one."""
        detail = fields.get("detail", event)
        prompt = fields.get("prompt")
        self.first = self.first or (f"{detail}" if prompt is None else f"prompt {prompt}: {detail}")

    error = warning

    def info(self, event: str, **fields: Any) -> None:
        """Say nothing."""

    debug = info


def _newest(run: RunDirectory) -> VersionRecord | None:
    if not run.versions.is_file():
        return None
    live = [row for row in read_versions(run.versions) if row.state == "live"]
    if not live:
        return None
    newest = live[-1]
    return VersionRecord(
        newest.version, newest.term, newest.step, newest.parent, newest.state, newest.digest
    )


def _with_model(config: Config, directory: Path) -> Config:
    model = {"path": str(directory), "build": None, "tokenizer_chars": None, "lora": None}
    # of the run's prompts only those held out are used: others may have changed
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=model),
            "task": config.task.model_copy(update={"fingerprint": None}),
            "warm_start": config.warm_start.model_copy(update={"steps": 0}),
        }
    )


@contextmanager
def _whole_model(model: ModelToEvaluate) -> Iterator[Path]:
    """Give the directory of a whole model; an adapter is merged into its base for as long."""
    adapter = model.directory / "adapter_config.json"
    merged = model.directory / "merged"
    if not adapter.is_file():
        yield model.directory
    elif merged.is_dir():
        yield merged
    else:
        from ratchet.backends.lora import merge_adapter
        from ratchet.backends.models import load_tokenizer, save_model_directory

        named = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
        base = Path(named or "")
        if not named or not base.is_dir():
            msg = f"{adapter} names the base model {named!r}, which is no directory here"
            raise UserError(msg)
        with tempfile.TemporaryDirectory(prefix="ratchet-eval-") as temporary:
            whole = Path(temporary) / "model"
            adapted = merge_adapter(base, model.config.model.dtype, model.directory)
            save_model_directory(adapted, load_tokenizer(base), whole)
            yield whole
