"""The summary of a run, during or after it.

Consumes the files of a run directory (metrics.jsonl, versions.sqlite, ledger.sqlite, summary.json),
any of which may be missing, produces a `RunReport` and its text. Waits for nothing; reads only.
"""

from __future__ import annotations

import shlex
import sqlite3
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ratchet.errors import UserError
from ratchet.observability.follow import read_logs
from ratchet.observability.lines import LineFilter, printable
from ratchet.observability.metrics import Metrics, read_metrics
from ratchet.observability.rundir import RunDirectory
from ratchet.stats import Distribution, merged

_EDGE_STEPS: Final = 20
_POPULATIONS: Final = ("offered", "trained", "lost")


class EvalResult(msgspec.Struct, frozen=True):
    """Accuracy of one version on held-out prompts."""

    version: int
    accuracy: float
    num_prompts: int
    num_failed: int = 0


class Summary(msgspec.Struct, frozen=True):
    """What the trainer wrote at the end (summary.json)."""

    status: str = "unfinished"
    reason: str | None = None
    steps: int | None = None
    eval_before: EvalResult | None = None
    eval_after: EvalResult | None = None


class RunReport(msgspec.Struct, frozen=True):
    """A run in numbers. None where nothing was measured."""

    directory: str
    summary: Summary
    num_steps: int
    num_skipped_steps: int
    seconds: float | None
    edge_steps: int
    """steps at each end over which rewards are averaged: a tenth of all, at most 20"""
    reward_first: float | None
    reward_last: float | None
    offered_reward_first: float | None
    """of all groups that finished, those dropped by a filter included"""
    offered_reward_last: float | None
    tokens: dict[str, Distribution]
    """lengths of the rollouts that were offered, trained and lost"""
    rewards: dict[str, Distribution]
    """and rewards of their trajectories"""
    versions: dict[str, int]
    """by state"""
    groups: dict[str, int]
    """by state"""
    dropped: dict[str, int]
    """by reason"""
    retried: int
    staleness: dict[int, int]
    """groups trained at each staleness"""
    two_version_rollouts: int
    tokens_per_s: float | None
    trainer_busy_share: float | None
    rollout_busy_share: float | None
    num_errors: int
    num_warnings: int


def make_report(directory: Path) -> RunReport:
    """Read the run directory.

    Raises:
        UserError: if it is not a directory, or one of its files is damaged.
    """
    if not directory.is_dir():
        msg = f"{directory} is not a directory; give the directory of a run, such as runs/NAME"
        raise UserError(msg)
    run = RunDirectory(directory)
    steps = read_metrics(run.metrics)
    edge = min(_EDGE_STEPS, max(1, len(steps) // 10))
    staleness: Counter[int] = Counter()
    for step in steps:
        histogram = step.get("buffer/staleness_histogram") or {}
        staleness.update({int(k): n for k, n in histogram.items()})
    versions, groups, dropped = _ledgers(run)
    levels = _levels(run.logs)
    return RunReport(
        directory=str(directory),
        summary=_summary(run.summary),
        num_steps=len(steps),
        num_skipped_steps=sum(step.get("applied") is False for step in steps),
        seconds=steps[-1].get("time_s") if steps else None,
        edge_steps=edge,
        reward_first=_mean(steps[:edge], "reward_mean"),
        reward_last=_mean(steps[-edge:], "reward_mean"),
        offered_reward_first=_offered(steps[:edge]),
        offered_reward_last=_offered(steps[-edge:]),
        tokens={name: _merged(steps, f"buffer/{name}/tokens") for name in _POPULATIONS},
        rewards={name: _merged(steps, f"buffer/{name}/reward") for name in _POPULATIONS},
        versions=versions,
        groups=groups,
        dropped=dropped,
        retried=sum(sum((step.get("buffer/retried") or {}).values()) for step in steps),
        staleness=dict(sorted(staleness.items())),
        two_version_rollouts=sum(step.get("buffer/two_version_rollouts") or 0 for step in steps),
        tokens_per_s=_mean(steps, "tokens_per_s"),
        trainer_busy_share=_mean(steps, "trainer_busy_share"),
        rollout_busy_share=_mean(steps, "rollout_busy_share"),
        num_errors=levels["error"] + levels["critical"],
        num_warnings=levels["warning"],
    )


def print_report(directory: Path, console: Console | None = None) -> None:
    """Print the report of a run directory.

    Raises:
        UserError: if it is not a directory, or one of its files is damaged.
    """
    console = console if console is not None else Console()
    report = make_report(directory)
    table = Table.grid(padding=(0, 2))
    for name, value in _rows(report):
        table.add_row(Text(name, style="dim"), Text(printable(value)))
    console.print(Text(f"\n{printable(report.directory)}", style="bold"))
    console.print(table)
    console.print(Text("\nwhere to look next", style="bold"))
    for line in _next(report):
        console.print(Text(f"  {printable(line)}"), soft_wrap=True)


def _rows(report: RunReport) -> Iterable[tuple[str, str]]:
    summary = report.summary
    yield "status", summary.status + (f": {summary.reason}" if summary.reason else "")
    skipped = f", {report.num_skipped_steps} skipped" if report.num_skipped_steps else ""
    yield "steps", f"{report.num_steps}{skipped}, {_text(report.seconds, 0)} s"
    yield (
        "reward",
        f"{_text(report.reward_first)} -> {_text(report.reward_last)}"
        f" (means of the first and last {report.edge_steps} steps)",
    )
    if report.dropped:
        yield (
            "all groups",
            f"{_text(report.offered_reward_first)} -> {_text(report.offered_reward_last)}"
            " (rewards of the dropped ones included)",
        )
    yield "held out", f"{_accuracy(summary.eval_before)} -> {_accuracy(summary.eval_after)}"
    yield "versions", _counts(report.versions)
    yield "groups", _counts(report.groups)
    yield "dropped", _counts(report.dropped)
    if report.tokens["lost"].count:
        yield "lengths", _selection(report.tokens, 0)
        yield "rewards", _selection(report.rewards, 3)
    yield "retried", str(report.retried)
    yield "staleness", _histogram(report.staleness)
    yield "mixed", f"{report.two_version_rollouts} rollouts with tokens of several versions"
    yield "tokens/s", _text(report.tokens_per_s, 0)
    yield (
        "busy",
        f"trainer {_share(report.trainer_busy_share)}, engines {_share(report.rollout_busy_share)}",
    )
    yield "log", f"{report.num_errors} errors, {report.num_warnings} warnings"


def _next(report: RunReport) -> Iterable[str]:
    directory = shlex.quote(report.directory)
    if report.num_errors or report.num_warnings:
        yield f"ratchet logs {directory} --level warning"
    else:
        yield f"ratchet logs {directory}"
    yield f"ratchet versions {directory}"
    yield f"ratchet groups {directory}" + (" --state dropped" if report.dropped else "")
    run = RunDirectory(Path(report.directory))
    for path in (run.metrics, run.summary, run.model):
        if path.exists():
            yield str(path)


def _summary(path: Path) -> Summary:
    if not path.exists():
        return Summary()
    try:
        return msgspec.json.decode(path.read_bytes(), type=Summary)
    except msgspec.DecodeError as error:
        msg = f"{path} is damaged: {error}"
        raise UserError(msg) from error


def _ledgers(run: RunDirectory) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Return versions by state, groups by state and dropped groups by reason.

    Only counted here, in the files' own words; `ratchet.storage` gives the records.
    """
    versions = _count(run.versions, "SELECT state FROM versions")
    groups = _count(run.ledger, "SELECT state FROM groups")
    dropped = _count(run.ledger, "SELECT reason FROM groups WHERE state = 'dropped'")
    return versions, groups, dropped


def _count(path: Path, query: str) -> dict[str, int]:
    if not path.exists():
        return {}
    try:
        uri = f"file:{quote(str(path.absolute()))}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            return dict(sorted(Counter(value for (value,) in connection.execute(query)).items()))
    except sqlite3.Error as error:
        msg = f"cannot read {path}: {error}; it is damaged, or of another release"
        raise UserError(msg) from error


def _levels(logs: Path) -> Counter[str | None]:
    return Counter(line.level for line in read_logs(logs, LineFilter(level="warning")))


def _mean(steps: Sequence[Metrics], name: str) -> float | None:
    values = [step[name] for step in steps if isinstance(step.get(name), int | float)]
    return statistics.fmean(values) if values else None


def _merged(steps: Sequence[Metrics], name: str) -> Distribution:
    return merged(Distribution.of_summary(step[name]) for step in steps if step.get(name))


def _offered(steps: Sequence[Metrics]) -> float | None:
    rewards = _merged(steps, "buffer/offered/reward")
    return rewards.mean if rewards.count else None


def _selection(parts: Mapping[str, Distribution], digits: int) -> str:
    """Say of what was offered, trained and lost where it differs."""
    return ", ".join(
        f"{name} {each.mean:.{digits}f} (p90 {each.quantile(0.9):g})" if each.count else f"{name} -"
        for name, each in parts.items()
    )


def _text(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _accuracy(result: EvalResult | None) -> str:
    if result is None:
        return "-"
    failed = f", {result.num_failed} failed" if result.num_failed else ""
    return f"{result.accuracy:.3f} (version {result.version}, {result.num_prompts} prompts{failed})"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _histogram(counts: Mapping[int, int]) -> str:
    total = sum(counts.values())
    return ", ".join(f"{k}: {n} ({n / total:.0%})" for k, n in counts.items()) or "-"
