"""The commands that look into a run directory: logs, versions, groups, report.

They consume its files, produce tables for people or one JSON object a line for programs, and work
beside a running run as well as after it. Nothing is ever written. Heavy imports wait until a
command needs them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ratchet.errors import UserError

if TYPE_CHECKING:
    from ratchet.observability.lines import LineFilter, LogLine

app = typer.Typer()

RUNS = Path("runs")

Directory = Annotated[Path, typer.Argument(help="Run directory.", metavar="DIR")]
_LARGEST: Final = 2**63 - 1
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]


@app.command()
def logs(
    directory: Annotated[
        Path | None,
        typer.Argument(help="Run directory; the newest one in runs/ by default.", metavar="[DIR]"),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for more, until interrupted.")
    ] = False,
    role: Annotated[
        str | None, typer.Option(help="One role (rollout-1), or all of a kind (rollout).")
    ] = None,
    level: Annotated[
        str | None, typer.Option(help="At least: debug, info, warning, error, critical.")
    ] = None,
    event: Annotated[str | None, typer.Option(help='Glob, such as "version_*".')] = None,
    where: Annotated[
        list[str] | None, typer.Option(help="field=value; repeatable, all must hold.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the logs of all processes of a run, merged by time."""
    from ratchet.observability.follow import read_logs
    from ratchet.observability.lines import LineFilter

    wanted = LineFilter.parse(role=role, level=level, event=event, where=where or ())
    root = _run_directory(directory if directory is not None else _newest_run(RUNS))
    if follow:
        try:
            asyncio.run(_follow(root / "logs", wanted, as_json))
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
    for line in read_logs(root / "logs", wanted):
        _print_line(line, as_json)


@app.command()
def versions(directory: Directory, as_json: Json = False) -> None:
    """List every policy version of a run: number, term, step, parent, state."""
    from ratchet.observability.rundir import RunDirectory
    from ratchet.storage.versions import VersionHistory, read_versions

    rows = read_versions(RunDirectory(_run_directory(directory)).versions)
    if as_json:
        _print_json(rows)
        return
    columns = dict.fromkeys(VersionHistory.__struct_fields__, "")
    columns |= {"created_at": "reserved", "decided_at": "decided"}
    _print_table(columns, rows)


@app.command()
def groups(
    directory: Directory,
    state: Annotated[
        str | None,
        typer.Option(help="issued, claimed, finished, batched, trained, committed or dropped."),
    ] = None,
    version: Annotated[
        int | None,
        typer.Option(
            min=0, max=_LARGEST, help="Only groups with tokens around this policy version."
        ),
    ] = None,
    group: Annotated[
        int | None, typer.Option(min=0, max=_LARGEST, help="The whole life of this one group.")
    ] = None,
    last: Annotated[
        int, typer.Option(min=0, help="Rows of the table; 0 for all. JSON has all.")
    ] = 50,
    as_json: Json = False,
) -> None:
    """List prompt groups: where each one is, how stale it was, which step trained it."""
    from collections import deque

    if group is not None:
        _print_life(directory, group, as_json)
        return
    from ratchet.observability.rundir import RunDirectory
    from ratchet.storage.groups import read_groups

    rows = read_groups(
        RunDirectory(_run_directory(directory)).ledger, state=_group_state(state), version=version
    )
    if as_json:
        _print_json(rows)
        return
    shown = deque(enumerate(rows, start=1), maxlen=last or None)
    columns = {
        "group_id": "group",
        "prompt_id": "prompt",
        "epoch": "",
        "attempt": "",
        "state": "",
        "reason": "",
        "worker": "",
        "min_version": "min v",
        "max_version": "max v",
        "staleness": "stale",
        "trained_step": "step",
        "reward_mean": "reward",
        "num_tokens": "tokens",
    }
    _print_table(columns, (row for _, row in shown))
    total = shown[-1][0] if shown else 0
    if total > len(shown):
        typer.echo(f"the last {len(shown)} of {total} groups; --last 0 shows all")


def _print_life(directory: Path, group_id: int, as_json: bool) -> None:
    import msgspec

    from ratchet.observability.rundir import RunDirectory
    from ratchet.storage.groups import GroupRow, read_life

    run = RunDirectory(_run_directory(directory))
    life = read_life(run.ledger, group_id)
    if life is None:
        msg = f"--group {group_id}: {run.ledger} has no such group"
        raise UserError(msg)
    row, events = life
    if as_json:
        _print_json([{**msgspec.to_builtins(row), "life": events}])
        return
    for name in GroupRow.__struct_fields__:
        if (value := getattr(row, name)) is not None:
            typer.echo(f"{name.removesuffix('_id'):16} {_cell(name, value)}")
    typer.echo()
    _print_table(dict.fromkeys(("at", "event", "detail"), ""), events)


@app.command()
def report(directory: Directory, as_json: Json = False) -> None:
    """Summarise a run: rewards, accuracy, staleness, versions, drops."""
    from ratchet.observability.report import make_report, print_report

    root = _run_directory(directory)
    if as_json:
        _print_json([make_report(root)])
    else:
        print_report(root)


async def _follow(directory: Path, wanted: LineFilter, as_json: bool) -> None:
    from ratchet.observability.follow import follow_logs

    async for line in follow_logs(directory, wanted, until=lambda: False):
        _print_line(line, as_json)


def _print_line(line: LogLine, as_json: bool) -> None:
    from ratchet.observability.lines import show

    if not as_json:
        colour = {"warning": "yellow", "error": "red", "critical": "red"}.get(line.level or "")
        typer.secho(show(line), fg=colour, color=False if os.environ.get("NO_COLOR") else None)
    elif line.fields is not None:
        typer.echo(line.raw)
    else:
        _print_json([{"timestamp": line.timestamp, "role": line.source, "raw": line.raw}])


def _print_json(rows: Iterable[Any]) -> None:
    import msgspec

    for row in rows:
        typer.echo(msgspec.json.encode(row))


def _print_table(columns: Mapping[str, str], rows: Iterator[Any] | Iterable[Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, title in columns.items():
        table.add_column(title or name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(name, getattr(row, name))) for name in columns))
    console = Console()
    if not console.is_terminal:  # a pipe has no width
        console = Console(width=10_000)
    console.print(table)


def _cell(name: str, value: Any) -> str:
    from ratchet.observability.lines import printable

    if value is None:
        return "-"
    if name == "at" or name.endswith("_at"):
        from datetime import datetime

        return datetime.fromtimestamp(value).astimezone().strftime("%m-%d %H:%M:%S")
    if name == "digest":
        return str(value)[:12]
    return f"{value:.3f}" if isinstance(value, float) else printable(str(value))


def _group_state(state: str | None) -> Any:
    from ratchet.storage.groups import STATES

    if state is not None and state not in STATES:
        msg = f"--state {state!r} is not known; use one of {', '.join(STATES)}"
        raise UserError(msg)
    return state


def _run_directory(directory: Path) -> Path:
    if not directory.exists():
        msg = f"{directory} does not exist; give the directory of a run, such as runs/NAME"
        raise UserError(msg)
    if not (directory / "logs").is_dir():
        msg = f"{directory} is not a run directory: it has no logs/; runs are in runs/ by default"
        raise UserError(msg)
    return directory


def _newest_run(runs: Path) -> Path:
    found = (
        [entry for entry in runs.iterdir() if (entry / "logs").is_dir()] if runs.is_dir() else []
    )
    if not found:
        msg = f"there is no run in {runs}/ here; give the directory of a run"
        raise UserError(msg)
    return max(found, key=lambda entry: (entry / "logs").stat().st_mtime)
