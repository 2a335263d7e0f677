"""`ratchet launch`: one role of a run on this node, in the foreground.

Consumes argv, produces lines of progress and an exit code: 0 when the run has ended, 1 when it
failed, with the first cause on the last line, 2 for a mistake of the user, 130 or 143 when it was
interrupted. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ratchet.cli_foreground import in_foreground
from ratchet.errors import ConfigError
from ratchet.types import RoleKind

app = typer.Typer()


class Role(StrEnum):
    """What can be launched."""

    REGISTRY = "registry"
    BUFFER = "buffer"
    TRAINER = "trainer"
    ROLLOUT = "rollout"


_Option = typer.Option


@app.command()
def launch(  # noqa: PLR0913 - each is an option of the command line
    role: Annotated[Role, typer.Argument(help="What to run on this node.")],
    config: Annotated[Path, typer.Argument(help="TOML file, the same on every node.")],
    registry: Annotated[
        str, _Option(metavar="HOST:PORT", help="Where the registry is; where it listens itself.")
    ],
    node_rank: Annotated[
        int | None,
        _Option(min=0, help="Number of this node: rollout-N. A rollout may do without."),
    ] = None,
    host: Annotated[
        str | None,
        _Option(
            metavar="IP", help="Address of this node; by default the one towards the registry."
        ),
    ] = None,
    directory: Annotated[
        Path | None, _Option("--dir", help="Files of this node; runs/NAME by default.")
    ] = None,
    token_file: Annotated[
        str | None, _Option(metavar="FILE", help="Secret of the run, of mode 0600.")
    ] = None,
    tls_ca: Annotated[
        str | None, _Option(metavar="FILE", help="Certificate of the run's authority.")
    ] = None,
    tls_cert: Annotated[
        str | None, _Option(metavar="FILE", help="Certificate of this node.")
    ] = None,
    tls_key: Annotated[
        str | None, _Option(metavar="FILE", help="Private key of this node, of mode 0600.")
    ] = None,
    overrides: Annotated[
        list[str] | None, _Option("--set", help="section.key=value; repeatable.")
    ] = None,
    evaluates: Annotated[
        bool, _Option("--eval", help='A rollout that only evaluates: eval.engines = "own".')
    ] = False,
    standby: Annotated[
        bool,
        _Option(
            "--standby",
            help="A trainer that takes over when the trainer of the run is dead; --dir is the same"
            " directory as that one's, shared.",
        ),
    ] = False,
    num_nodes: Annotated[int, _Option(min=1, help="Nodes of the trainer.")] = 1,
    rendezvous: Annotated[
        str | None, _Option(metavar="HOST:PORT", help="Where the nodes of the trainer meet.")
    ] = None,
    wait: Annotated[
        float, _Option(min=0, metavar="SECONDS", help="Patience with a registry that is away.")
    ] = 300.0,
) -> None:
    """Run one role of a run on this node, until the run ends.

    Start the registry first, then a buffer, a trainer and any number of rollouts, in any order and
    on any nodes. Rollouts may join and leave at any time.
    """
    from ratchet.runtime.launch import Launch
    from ratchet.runtime.launch_view import open_launch_view
    from ratchet.runtime.node_config import LaunchOptions

    if evaluates and role is not Role.ROLLOUT:
        raise ConfigError(f"--eval is for a rollout, and not for the {role.value}")
    tls = {"ca": tls_ca, "cert": tls_cert, "key": tls_key}
    options = LaunchOptions(
        registry=registry,
        node_rank=node_rank,
        host=host,
        directory=directory,
        token_file=token_file,
        tls={name: path for name, path in tls.items() if path is not None},
        overrides=overrides or (),
        num_nodes=num_nodes,
        rendezvous=rendezvous,
        standby=standby,
        wait_s=wait,
    )
    kind: RoleKind = "evaluator" if evaluates else role.value
    launched = Launch(kind, config, options, say=typer.echo)
    outcome, code = in_foreground(launched.run, launched.request_stop, open_launch_view(launched))
    typer.echo(launched.result(outcome))
    raise typer.Exit(code)
