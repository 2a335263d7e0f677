"""Why a run stands still: who waits on whom, and what is wrong with the one at the end. Pure.

Consumes the `RunStatus` that a registry tells, produces the longest chain of waits and one sentence
about it; waits for nothing.

Each process reports on its own, so two rows of the table need not have been true together. A chain
is made only of waits that were: they are looked at as of the oldest of the present reports, at a
moment that every wait covers which has lasted longer than that report is old. What a silent process
reported last is taken to hold still: its loop does nothing that could have ended it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from ratchet.status import LinkRow, RoleStatus, RunStatus, WaitRow

ORDERLY: Final = "stopped"
"""The reason with which a role leaves that was told to."""
_LATE_S: Final = 1.0
_DEEP: Final = 100
_MOST_NAMED: Final = 3


class Chain(msgspec.Struct, frozen=True):
    """Waits, each on whoever has the next one."""

    waits: tuple[WaitRow, ...] = ()
    cycle: bool = False
    """the last one waits on the first: a deadlock, until a deadline ends it"""


def is_quiet(role: RoleStatus, suspect_s: float) -> bool:
    """Whether a role has been silent for so long that one should say so."""
    return role.silent_s >= suspect_s / 2


def waits_of(status: RunStatus) -> tuple[WaitRow, ...]:
    """Return every wait of the run as of now, the longest first."""
    rows = (row for role in status.roles for row in _rows(role))
    return tuple(sorted(rows, key=lambda row: -row.waited_s))


def longest_chain(status: RunStatus) -> Chain:
    """Return the longest chain of waits that go on together.

    Of equals the one that ends at somebody with trouble, then the one that began first. A cycle is
    longer than anything else: nothing within it can end it.
    """
    edges = _edges(status)
    cycle = _cycle(edges)
    if cycle:
        return Chain(cycle, cycle=True)
    kinds: dict[str, list[str]] = {}
    for role in _here(status):
        kinds.setdefault(role.role.kind, []).append(role.role.name)
    troubled = {r.role.name for r in status.roles if _trouble(r, status.suspect_s) is not None}
    best: dict[str, tuple[WaitRow, ...]] = {}

    def rank(chain: Sequence[WaitRow]) -> tuple[int, bool, float]:
        if not chain:
            return 0, False, 0.0
        return len(chain), chain[-1].on in troubled, chain[0].waited_s

    def chain_from(name: str, above: frozenset[str]) -> tuple[WaitRow, ...]:
        if name not in best:
            found: tuple[WaitRow, ...] = ()
            for row in edges.get(name, ()):
                for follower in kinds.get(row.on, [row.on]):
                    if follower not in above:
                        chain = (row, *chain_from(follower, above | {follower}))
                        found = max(found, chain, key=rank)
            best[name] = found
        return best[name]

    chains = (chain_from(name, frozenset((name,))) for name in edges)
    return Chain(max(chains, key=rank, default=()))


def explain(status: RunStatus) -> str:
    """Say in one sentence how the run does, and if somebody waits, on what in the end."""
    if status.end is not None:
        return f"the run has ended: {status.end} ({status.end_reason})"
    chain = longest_chain(status)
    waits = [f"{w.who} waits {w.waited_s:.1f} s on {w.on} for {w.what}" for w in chain.waits]
    if chain.cycle:
        first = min(chain.waits, key=lambda row: row.left_s)
        end = f"{first.who} gives up in {max(0.0, first.left_s):.1f} s"
        return f"deadlock: {'; '.join([*waits, end])}"
    causes = list(_causes(status, chain.waits[-1])) if chain.waits else []
    others = [text for text in _troubles(status) if text not in causes]
    if len(others) > _MOST_NAMED:
        others[_MOST_NAMED:] = [f"and {len(others) - _MOST_NAMED} more have trouble"]
    if waits:
        first = chain.waits[0]
        end = f"{first.who} gives up in {max(0.0, first.left_s):.1f} s"
    else:
        end = _at_work(status)
    return "; ".join([*waits, *causes, *others, end])


# --- the graph


def _here(status: RunStatus) -> Iterator[RoleStatus]:
    """The roles that are up or start."""
    return (role for role in status.roles if role.reason is None)


def _rows(role: RoleStatus) -> Iterator[WaitRow]:
    if role.reason is None and role.report is not None:
        age_s = role.report_age_s or 0.0
        for row in role.report.waits:
            yield WaitRow(row.who, row.on, row.what, row.waited_s + age_s, row.left_s - age_s)


def _edges(status: RunStatus) -> dict[str, list[WaitRow]]:
    """The waits that go on together, by who waits: of several on the same one, the oldest."""
    quiet = {role.role.name for role in status.roles if is_quiet(role, status.suspect_s)}
    ages = [role.report_age_s or 0.0 for role in _here(status) if role.role.name not in quiet]
    age_s = max(ages, default=0.0)
    edges: dict[str, dict[str, WaitRow]] = {}
    for role in _here(status):
        for row in sorted(_rows(role), key=lambda row: -row.waited_s):
            if row.waited_s >= age_s:
                edges.setdefault(row.who, {}).setdefault(row.on, row)
    return {who: list(rows.values()) for who, rows in edges.items()}


def _cycle(edges: dict[str, list[WaitRow]]) -> tuple[WaitRow, ...]:
    """Return a cycle of waits, or nothing. A wait on any of a kind closes none."""
    done: set[str] = set()

    def follow(path: list[WaitRow]) -> tuple[WaitRow, ...]:
        name = path[-1].on
        for index, row in enumerate(path):
            if row.who == name:
                return tuple(path[index:])
        if name in done:
            return ()
        for row in edges.get(name, ()):
            if cycle := follow([*path, row]):
                return cycle
        done.add(name)
        return ()

    return next((cycle for rows in edges.values() for r in rows if (cycle := follow([r]))), ())


# --- what is wrong


def _causes(status: RunStatus, last: WaitRow) -> Iterator[str]:
    """Say what is known of the end of a chain."""
    yield from _link_trouble(status, last)
    named = [role for role in status.roles if role.role.name == last.on]
    if named:
        role = named[0]
        yield _trouble(role, status.suspect_s) or _idle(role)
        if role.role.kind == "buffer" and _fact(role, "request_step") is not None:
            yield from _missing_groups(status, role)
    elif last.on in {"registry", "buffer", "rollout", "trainer"}:
        yield from _kind(status, last.on)
    else:
        yield f"nobody here is called {last.on}"


def _kind(status: RunStatus, kind: str) -> Iterator[str]:
    roles = [role for role in status.roles if role.role.kind == kind]
    if not any(role.up for role in roles):
        yield f"no {kind} is up"
    for role in roles[:_MOST_NAMED]:
        yield _trouble(role, status.suspect_s) or _idle(role)
    if len(roles) > _MOST_NAMED:
        yield f"and {len(roles) - _MOST_NAMED} more"


def _link_trouble(status: RunStatus, wait: WaitRow) -> Iterator[str]:
    for role in _here(status):
        if role.role.name == wait.who and role.report is not None:
            for link in role.report.links:
                if link.peer == wait.on and (link.trouble is not None or not link.connected):
                    yield f"the link from {wait.who} to {wait.on} is down{_of_link(link)}"


def _of_link(link: LinkRow) -> str:
    trouble = f": {link.trouble}" if link.trouble else ""
    return f"{trouble} ({link.num_queued} messages wait)" if link.num_queued else trouble


def _missing_groups(status: RunStatus, buffer: RoleStatus) -> Iterator[str]:
    """Say what keeps a batch from being full."""
    queued, wanted = _number(buffer, "queue_groups"), _number(buffer, "batch_groups")
    flying = _number(buffer, "in_flight_groups")
    yield f"it has {queued} of {wanted} groups for it, and {flying} are in flight"
    rollouts = [role for role in status.roles if role.role.kind in {"rollout", "producer"}]
    up = [role for role in rollouts if role.up]
    if not up:
        yield "no rollout is up"
    elif not flying and not _number(buffer, "credit_groups"):
        yield "no rollout asks for prompts"
        yield from (f"{r.role.name} holds no version" for r in up if _lacks_version(r))
    elif not flying and _number(buffer, "withheld_groups"):
        yield "its room waits for the weights that are trained on what it had"


def _lacks_version(role: RoleStatus) -> bool:
    return (
        role.report is not None
        and "version" in role.report.facts
        and (role.report.facts["version"] is None)
    )


def _trouble(role: RoleStatus, suspect_s: float) -> str | None:
    """Say what is wrong with a role, if something is."""
    name = role.role.name
    if role.reason is not None:
        return f"{name} has left: {role.reason}"
    if not role.up:
        return f"{name} has started and not registered yet"
    if not role.connected:
        return f"the process of {name} cannot be reached, for {role.silent_s:.0f} s"
    if is_quiet(role, suspect_s):
        return f"{name} has not responded for {role.silent_s:.0f} s, though its process is there"
    report = role.report
    if report is not None and report.loop_lag_s >= _LATE_S:
        return f"the loop of {name} was held up for {report.loop_lag_s:.1f} s"
    if report is not None and (depth := sum(report.mailboxes.values())) >= _DEEP:
        return f"{depth} messages wait in {name}"
    return None


def _troubles(status: RunStatus) -> Iterator[str]:
    for role in status.roles:
        text = _trouble(role, status.suspect_s)
        if text is not None and role.reason != ORDERLY:
            yield text
    for kind in ("buffer", "trainer", "rollout"):
        if not any(role.role.kind == kind and role.reason is None for role in status.roles):
            yield f"no {kind} is up"


def _idle(role: RoleStatus) -> str:
    """Say what a role does that responds, and waits on nobody."""
    name = role.role.name
    loading = _fact(role, "loading")
    if loading is not None:
        return f"{name} loads version {loading}"
    if _lacks_version(role) and role.role.kind == "rollout":
        return f"{name} responds and holds no version"
    return f"{name} responds and waits on nobody"


def _at_work(status: RunStatus) -> str:
    well = [role for role in _here(status) if _trouble(role, status.suspect_s) is None]
    age_s = max((role.report_age_s or 0.0 for role in well), default=0.0)
    text = f"{len(well)} roles respond, and none has waited for longer than {age_s:.1f} s"
    for role in well:
        if isinstance(seconds := _fact(role, "last_step_s"), float):
            seconds += role.report_age_s or 0.0
            text += f"; the last step of {role.role.name} was {seconds:.1f} s ago"
    return text


def _fact(role: RoleStatus, name: str) -> int | float | str | bool | None:
    return None if role.report is None else role.report.facts.get(name)


def _number(role: RoleStatus, name: str) -> int:
    value = _fact(role, name)
    return value if isinstance(value, int) else 0
