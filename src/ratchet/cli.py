"""The `ratchet` command: parse, call the runtime, print.

Consumes argv, produces text and an exit code: 0 for a run that ended, 1 for a run that failed, 2
for a mistake of the user, 130 or 143 for an interrupted one. Nothing heavy is imported before a
command needs it.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from ratchet import __version__
from ratchet.cli_audit import app as audit_app
from ratchet.cli_eval import app as eval_app
from ratchet.cli_foreground import in_foreground
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
app.add_typer(audit_app)
app.add_typer(eval_app)
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

    _train(Run(config, directory=directory, overrides=overrides or [], in_process=in_process))


@app.command()
def resume(
    directory: Annotated[Path, typer.Argument(help="Directory of the run.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Go on from the checkpoint of this step.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value; repeatable.")
    ] = None,
) -> None:
    """Go on with a run that has ended on this machine, however it did, from a checkpoint."""
    from ratchet.runtime.run import Run

    _train(Run.resume(directory, step=step, overrides=overrides or []), resumed=True)


@app.command()
def check(
    config: Annotated[Path, typer.Argument(help="TOML file.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value; repeatable.")
    ] = None,
) -> None:
    """Check a configuration, its task and its prompts; print it with every default filled in, and
    with the fingerprint of the prompts.
    """
    from ratchet.config import load_config
    from ratchet.runtime.prepare import check_run, with_fingerprint

    resolved = load_config(config, overrides or [])
    task = check_run(resolved)
    typer.echo(with_fingerprint(resolved, task).to_toml())


def _train(training: Run, *, resumed: bool = False) -> NoReturn:
    """Run to the end in the foreground, and exit."""
    from ratchet.observability.live import open_view
    from ratchet.observability.report import print_report

    root = training.directory.root
    view = open_view(root)
    if resumed:
        view.skip()  # what its earlier life has shown
    _, code = in_foreground(training.run, partial(training.request, now=True), view)
    print_report(root)
    training.result()
    raise typer.Exit(code)


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
