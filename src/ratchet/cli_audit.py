"""The commands that judge a run directory and take from it: audit, export.

They consume its files, produce a verdict or a model. `audit` writes nothing and works beside a
running run; exit code 1 names what does not hold. Heavy imports wait until a command needs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ratchet.observability.rundir import RunDirectory
    from ratchet.storage.audit import Limits

app = typer.Typer()

Directory = Annotated[Path, typer.Argument(help="Run directory.", metavar="DIR")]


@app.command()
def audit(
    directory: Directory,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Prove from the files alone that nothing was lost, trained twice or too late."""
    import msgspec

    from ratchet.observability.rundir import find_run
    from ratchet.storage.audit import audit as check
    from ratchet.storage.checkpoints import Checkpoints

    run = find_run(directory)
    limits = _limits(run)
    whole = (each.facts for each in Checkpoints(run.checkpoints, keep=1).there())
    findings = check(run.ledger, run.versions, whole, limits)
    for finding in findings:
        if as_json:
            typer.echo(msgspec.json.encode(finding))
            continue
        verdict = "holds" if not finding.num_wrong else f"{finding.num_wrong} WRONG"
        typer.echo(f"{finding.invariant}  {finding.check}: {finding.num_checked}, {verdict}")
        for problem in finding.wrong:
            typer.echo(f"      {problem}")
    if any(finding.num_wrong for finding in findings):
        raise typer.Exit(1)


@app.command()
def export(
    directory: Directory,
    output: Annotated[Path, typer.Argument(help="Directory to write; a new one.", metavar="OUT")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Of which step; the newest checkpoint by default.")
    ] = None,
) -> None:
    """Write the model in a checkpoint as Hugging Face safetensors."""
    from ratchet.runtime.export import export_checkpoint

    facts = export_checkpoint(directory, output, step)
    typer.echo(f"{output}: version {facts.version}, step {facts.step}")


def _limits(run: RunDirectory) -> Limits:
    """Return what the configurations of all lives of a run allow together."""
    from ratchet.config import load_config
    from ratchet.storage.audit import Limits

    configs = [run.load_config(), *map(load_config, sorted(run.root.glob("config-before-*.toml")))]
    return Limits(
        max(config.buffer.max_staleness for config in configs),
        max(config.most_open_groups for config in configs),
        max(config.buffer.batch_groups for config in configs),
        mixture=bool(configs[0].task.weights),
    )
