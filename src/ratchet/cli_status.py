"""`ratchet status`: what a run does, and what it waits for.

Consumes the address of a registry, from the run directory or from the command line, and the secret
of the run; produces tables for people or one JSON object for programs. Waits for the registry for a
few seconds. Exit code 0 if the run responds, 1 if it does not, 2 for a mistake of the user, a wrong
token among them. Nothing is ever written.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ratchet.errors import AuthFailed, UserError

if TYPE_CHECKING:
    from ratchet.observability.rundir import RunDirectory
    from ratchet.observability.status import StatusView
    from ratchet.runtime.placement import TlsFiles
    from ratchet.runtime.visitor import Visit
    from ratchet.transport.mailbox.address import Address

app = typer.Typer()

ANSWER_S = 5.0
"""Seconds that a registry has to answer."""


@app.command()
def status(
    directory: Annotated[
        Path | None,
        typer.Argument(help="Run directory; the newest one in runs/ by default.", metavar="[DIR]"),
    ] = None,
    registry: Annotated[
        str | None, typer.Option(help="HOST:PORT of a registry, instead of a directory.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File of mode 0600 with the secret of the run.")
    ] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="Certificate of the run's authority, PEM.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate of this node, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of this node, PEM.")] = None,
    watch: Annotated[
        float | None, typer.Option(min=0.1, help="Again each so many seconds, until interrupted.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Show the roles of a running run, what they wait for, and why it stands still if it does."""
    if directory is not None and registry is not None:
        raise UserError("give a run directory or --registry, and not both")
    tls = _tls_files(tls_ca, tls_cert, tls_key)
    if registry is not None:
        target = _named(registry, token_file, tls)
        run = None
    else:
        from ratchet.observability.rundir import find_run

        run = find_run(directory)
        found = _noted(run, token_file, tls)
        if isinstance(found, str):
            _look_back(run, found, as_json)
            raise typer.Exit(1)
        target = found
    try:
        asyncio.run(_show(target, watch, as_json))
    except _Unreached as error:
        if run is not None:
            _look_back(run, str(error), as_json)
        elif as_json:
            _print_json({"running": False, "why": str(error)})
        else:
            typer.echo(f"no run responds: {error}", err=True)
        raise typer.Exit(1) from None
    except AuthFailed as error:
        typer.echo(f"error: the registry at {target.address} refuses us: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@dataclass(frozen=True)
class _Target:
    """A registry, and how to be let in."""

    address: Address
    token_file: str | None
    tls: TlsFiles | None
    run_id: str = ""


class _Unreached(Exception):  # noqa: N818
    """Nobody answers; the text says what was tried."""


def _tls_files(ca: Path | None, cert: Path | None, key: Path | None) -> TlsFiles | None:
    from ratchet.runtime.placement import TlsFiles

    if ca is None and cert is None and key is None:
        return None
    if ca is None or cert is None or key is None:
        raise UserError("--tls-ca, --tls-cert and --tls-key go together: give all three, or none")
    return TlsFiles(str(ca), str(cert), str(key))


def _named(registry: str, token_file: Path | None, tls: TlsFiles | None) -> _Target:
    from ratchet.transport.mailbox.address import Address

    text = registry if registry.startswith(("tcp:", "unix:")) else f"tcp:{registry}"
    address = Address.parse(text)
    if token_file is None and tls is None:
        msg = (
            f"the registry at {address} lets nobody in without the secret of the run: give"
            " --token-file, or --tls-ca, --tls-cert and --tls-key"
        )
        raise UserError(msg)
    return _Target(address, None if token_file is None else str(token_file), tls)


def _noted(run: RunDirectory, token_file: Path | None, tls: TlsFiles | None) -> _Target | str:
    """Return the registry that a run directory names, or why there is none to ask."""
    from ratchet.runtime.rundir import read_links
    from ratchet.transport.mailbox.address import Address

    links = read_links(run)
    if links is None:
        return (
            "it has no links.json: its registry has ended or never began, or all ran in one process"
        )
    address = Address.parse(links.registry)
    token = links.token_file if token_file is None else str(token_file)
    if address.kind == "unix" and not Path(address.host).exists():
        return f"the socket of its registry, {address.host}, is gone"
    if token_file is None and token is not None and not Path(token).exists():
        return f"its token file, {token}, is not here"
    return _Target(address, token, tls or links.tls, links.run_id)


async def _show(target: _Target, watch: float | None, as_json: bool) -> None:
    from ratchet.observability.logs import SilentLog
    from ratchet.runtime.visitor import NotReached, visit
    from ratchet.transport.mailbox.credentials import open_credentials
    from ratchet.transport.mailbox.wire import SocketWire

    credentials = open_credentials(target.token_file, target.tls)
    wire = SocketWire(credentials)
    visiting = visit(
        target.address, key=credentials.key, log=SilentLog(), wire=wire, run_id=target.run_id
    )
    try:
        async with visiting as open_visit:
            await _print_all(open_visit, watch, as_json)
    except NotReached as error:
        raise _Unreached(str(error)) from None


async def _print_all(visit: Visit, watch: float | None, as_json: bool) -> None:
    from ratchet.observability.status import make_view

    while True:
        described = await visit.describe_now(ANSWER_S)
        _print(make_view(described.run_id, described.status), as_json, clear=watch is not None)
        if watch is None:
            return
        await asyncio.sleep(watch)


def _print(view: StatusView, as_json: bool, *, clear: bool) -> None:
    if as_json:
        _print_json(view)
        return
    from rich.console import Console

    from ratchet.observability.status import print_status

    console = Console()
    if clear and console.is_terminal:
        console.clear()
    print_status(view, console)


def _look_back(run: RunDirectory, why: str, as_json: bool) -> None:
    from ratchet.observability.aftermath import describe, look_back

    aftermath = look_back(run, why)
    if as_json:
        _print_json(aftermath)
        return
    for line in describe(aftermath):
        typer.echo(line)


def _print_json(data: Any) -> None:
    import msgspec

    typer.echo(msgspec.json.encode(data))
