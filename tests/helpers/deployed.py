"""Where the repository is, and its command line, parsed but not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer.main

from ratchet.cli import app

ROOT = Path(__file__).parents[2]


def parse(argv: list[str]) -> dict[str, Any]:
    """Parse a command line of `ratchet` as the command does, without running it."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    context = group.make_context("ratchet", list(argv))
    _, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
    assert command is not None
    return command.make_context(argv[0], rest, parent=context).params
