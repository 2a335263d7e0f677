"""The status of a run, as text for people and as JSON for programs. Pure.

Consumes the `RunStatus` that a registry tells, produces tables and a verdict; waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ratchet.observability.lines import printable
from ratchet.observability.waits import Chain, explain, is_quiet, longest_chain, waits_of
from ratchet.status import Fact, LinkRow, RoleStatus, RunStatus, WaitRow

_MOST_WAITS: Final = 20
_LATE_S: Final = 0.1


class StatusView(msgspec.Struct, frozen=True):
    """What `ratchet status --json` prints."""

    run_id: str
    status: RunStatus
    verdict: str
    chain: Chain
    waits: tuple[WaitRow, ...]
    """of all processes, as of now, the longest first"""
    running: bool = True


def make_view(run_id: str, status: RunStatus) -> StatusView:
    """Derive what can be said of a status."""
    return StatusView(run_id, status, explain(status), longest_chain(status), waits_of(status))


def render(view: StatusView) -> RenderableType:
    """Return the whole text."""
    status = view.status
    parts: list[RenderableType] = [Text(_header(view)), Text(), _roles(status)]
    facts = list(_all_facts(status))
    if facts:
        parts += [Text(), _table("", ("role", "says"), facts)]
    links = list(_troubled_links(status))
    if links:
        parts += [Text(), _table("links", ("from", "to", "state", "queued", "in flight"), links)]
    letters = list(_dead_letters(status))
    if letters:
        columns = ("dead letters", "told by", "to", "message", "why")
        parts += [Text(), _table("", columns, letters)]
    if view.waits:
        columns = ("who waits", "on", "for", "since", "gives up in")
        rows = [
            (row.who, row.on, row.what, f"{row.waited_s:.1f} s", f"{row.left_s:.1f} s")
            for row in view.waits[:_MOST_WAITS]
        ]
        parts += [Text(), _table("", columns, rows)]
        if len(view.waits) > _MOST_WAITS:
            parts.append(Text(f"and {len(view.waits) - _MOST_WAITS} more waits; --json has all"))
    parts += [Text(), Text(printable(view.verdict), style="bold")]
    return Group(*parts)


def print_status(view: StatusView, console: Console | None = None) -> None:
    """Print the text; a pipe has no width, so nothing is folded there."""
    console = console if console is not None else Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=10_000)
    console.print(render(view), soft_wrap=not console.is_terminal)


def _header(view: StatusView) -> str:
    status = view.status
    parts = [f"run {status.name or '?'} ({view.run_id[:12]})", f"up {duration(status.uptime_s)}"]
    parts.append(f"term {status.term}")
    if status.live is None:
        parts.append("no live version")
    else:
        parts.append(f"live version {status.live.version} (step {status.live.step}{_age(status)})")
    if status.newest is not None:
        parts.append(f"newest {status.newest}")
    parts.append(f"{status.num_burnt} burnt")
    if status.end is not None:
        parts.append(f"ended: {status.end}")
    return printable(", ".join(parts))


def _age(status: RunStatus) -> str:
    """How far the trainer is ahead of what is live."""
    steps = [
        step
        for role in status.roles
        if role.up and role.role.kind == "trainer" and role.report is not None
        if isinstance(step := role.report.facts.get("step"), int)
    ]
    if not steps or status.live is None:
        return ""
    return f", {max(0, max(steps) - status.live.step)} behind the trainer"


def _roles(status: RunStatus) -> Table:
    columns = ("role", "kind", "process", "loop", "restarts", "mailbox", "lag", "dead")
    return _table("", columns, (_role(role, status.suspect_s) for role in status.roles))


def _role(role: RoleStatus, suspect_s: float) -> tuple[str, ...]:
    report = role.report
    start = (role.role.name, role.role.kind, _process(role), _loop(role, suspect_s))
    restarts = str(role.num_starts - 1)
    if role.reason is not None or report is None:
        return (*start, restarts, "-", "-", "-")
    return (
        *start,
        restarts,
        str(sum(report.mailboxes.values())),
        f"{report.loop_lag_s * 1000:.0f} ms",
        str(report.num_dead_letters),
    )


def _all_facts(status: RunStatus) -> Iterator[tuple[str, str]]:
    """What the actors say, and of those that left the reason."""
    for role in status.roles:
        if role.reason is not None:
            yield role.role.name, f"left: {role.reason}"
        elif role.report is None:
            yield role.role.name, "has not reported yet"
        elif facts := ", ".join(_facts(role.report.facts.items())):
            yield role.role.name, facts


def _process(role: RoleStatus) -> str:
    if role.reason is not None:
        return "left"
    if not role.connected:
        return "lost"
    return "up" if role.report is None else f"up, {role.report.pid}@{role.report.host}"


def _loop(role: RoleStatus, suspect_s: float) -> str:
    if role.reason is not None:
        return "-"
    if is_quiet(role, suspect_s):
        return f"{'silent' if role.suspected else 'quiet'} {role.silent_s:.0f} s"
    if not role.up:
        return "starting"
    if role.report is not None and role.report.loop_lag_s >= _LATE_S:
        return "late"
    return "ok"


def _facts(facts: Iterable[tuple[str, Fact]]) -> Iterator[str]:
    """Say facts in words; what is not so, or not there, is left out."""
    for name, value in facts:
        label = name.removesuffix("_groups").removesuffix("_s").replace("_", " ")
        if value is None or value is False:
            continue
        if value is True:
            yield label
        elif isinstance(value, float) and name.endswith("_share"):
            yield f"{label} {value:.2f}"
        elif isinstance(value, float):
            yield f"{label} {value:.1f}" + (" s" if name.endswith("_s") else "")
        else:
            yield f"{label} {value}"


def _troubled_links(status: RunStatus) -> Iterator[tuple[str, ...]]:
    here = {role.role.name for role in status.roles if role.reason is None}
    for role in status.roles:
        if role.reason is not None or role.report is None:
            continue
        for link in role.report.links:
            state = _link_state(link, status.suspect_s)
            if link.num_queued or (state != "open" and link.peer in here):
                counts = (str(link.num_queued), str(link.num_in_flight))
                yield (role.role.name, link.peer, state, *counts)


def _link_state(link: LinkRow, suspect_s: float) -> str:
    if link.trouble is not None:
        return link.trouble
    if not link.connected:
        return "not connected"
    return f"silent {link.silent_s:.0f} s" if link.silent_s >= suspect_s / 2 else "open"


def _dead_letters(status: RunStatus) -> Iterator[tuple[str, ...]]:
    rows = (row for role in status.roles if role.report for row in role.report.dead_letters)
    for row in sorted(rows, key=lambda row: -row.count):
        yield str(row.count), row.sender or "-", row.receiver, row.message, row.reason


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title or None, box=None, pad_edge=False, header_style="bold")
    table.title_justify = "left"
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=name not in {"process", columns[-1]})
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def duration(seconds: float) -> str:
    """Return seconds for people: "12.3 s", "3 min 20 s", "2 h 5 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
