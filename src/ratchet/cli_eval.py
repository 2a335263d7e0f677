"""`ratchet eval`: evaluate an exported model on the held-out prompts of a task.

Consumes argv, produces a table or one JSON object, and an exit code: 0 for a result, 1 if no prompt
could be scored, 2 for a mistake of the user, 130 when interrupted. Nothing is written, and nothing
heavy is imported before the command runs.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ratchet.runtime.offline import OfflineEvaluation

app = typer.Typer()


@app.command(name="eval")
def evaluate(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A run that has ended, or a local Hugging Face model directory."
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML file; that of the run by default."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Evaluate a model on held-out prompts: eval.num_prompts of them, or all if that is 0."""
    import msgspec

    from ratchet.runtime.offline import evaluate_offline, find_model

    model = find_model(directory, config, overrides or ())
    try:
        evaluation = asyncio.run(evaluate_offline(model))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(msgspec.json.encode(evaluation))
    else:
        _print(evaluation)


def _print(found: OfflineEvaluation) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    of = "unknown" if found.version is None else f"{found.version} (step {found.step})"
    rows = {
        "model": found.model,
        "version": of,
        "digest": found.digest or "unknown",
        "task": found.task,
        "prompts": f"{found.num_prompts} scored, {found.num_failed} failed",
        "sampling": f"{found.samples} per prompt, temperature {found.temperature:g}",
        "accuracy": f"{found.accuracy:.4f}",
    }
    for label, part in found.tasks.items():
        rows[f"  {label}"] = f"{part['accuracy']:.4f} on {part['num_prompts']}"
    rows["seconds"] = f"{found.seconds:.1f}"
    if found.first_failure is not None:
        rows["first failure"] = found.first_failure
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    console = Console()
    if not console.is_terminal:  # a pipe has no width
        console = Console(width=10_000)
    console.print(table)
