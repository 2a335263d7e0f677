"""The `ratchet` command: parse, call the runtime, print.

Consumes argv, produces text and an exit code: 0 for a run that ended, 1 for a run that failed, 2
for a mistake of the user, 130 or 143 for an interrupted one. Nothing heavy is imported before a
command needs it.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ratchet import __version__
from ratchet.cli_inspect import app as inspect_app
from ratchet.cli_launch import app as launch_app
from ratchet.cli_status import app as status_app
from ratchet.errors import RunFailed, UserError

if TYPE_CHECKING:
    from ratchet.runtime.run import Run

app = typer.Typer(
    name="ratchet",
    help="Train language models with reinforcement learning, fully asynchronously.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(inspect_app)
app.add_typer(launch_app)
app.add_typer(status_app)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    del version


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="TOML file; see recipes/.")],
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Run directory; runs/NAME by default.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value; repeatable.")
    ] = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="All roles in this process, to debug.")
    ] = False,
) -> None:
    """Train: start every role on this machine, and stay until the model is written."""
    from ratchet.runtime.run import Run

    training = Run(config, directory=directory, overrides=overrides or [], in_process=in_process)
    raise typer.Exit(asyncio.run(_foreground(training)))


@app.command()
def check(
    config: Annotated[Path, typer.Argument(help="TOML file.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value; repeatable.")
    ] = None,
) -> None:
    """Check a configuration, its task and its prompts; print it with every default filled in."""
    from ratchet.config import load_config
    from ratchet.runtime.prepare import check_run

    resolved = load_config(config, overrides or [])
    check_run(resolved)
    typer.echo(resolved.to_toml())


async def _foreground(training: Run) -> int:
    """Run with a live view; the first signal stops everything, the second at once."""
    from ratchet.observability.live import open_view
    from ratchet.observability.report import print_report

    loop = asyncio.get_running_loop()
    signals: list[int] = []

    def interrupted(number: int) -> None:
        signals.append(number)
        training.request(now=True)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted, number)
    view = open_view(training.directory.root)
    viewing = asyncio.create_task(view.follow())
    try:
        await training.run()
    finally:
        await view.stop()
        await viewing
    print_report(training.directory.root)
    training.result()
    return 128 + signals[0] if signals else 0


def main() -> None:
    """Run the command; a user's mistake is one line on standard error and exit code 2."""
    try:
        app(standalone_mode=True)
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except RunFailed as error:
        typer.echo(f"the run failed: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
