"""Who is alive: the registry's knowledge of the roles of a run. Pure; the clock is the caller's.

Consumes joins, leaves and reports, produces the rows of `ratchet status`. Two facts are kept apart:
whether a role's process is there (its connection), and whether its loop responds (how long nothing
was heard of it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from ratchet.status import LinkRow, RoleReport, RoleStatus
from ratchet.types import RoleInfo

_MAX_LEFT: Final = 64
"""Roles that left and are still shown, the last ones."""


class Membership:
    """The living roles by name, and what each has said last."""

    def __init__(self) -> None:
        self._roles: dict[str, RoleInfo] = {}
        self._left: dict[str, tuple[RoleInfo, str]] = {}
        self._reports: dict[str, tuple[RoleReport, float]] = {}
        self._starts: Counter[str] = Counter()

    def __iter__(self) -> Iterator[RoleInfo]:
        """The living, in the order in which they joined."""
        return iter(tuple(self._roles.values()))

    def __len__(self) -> int:
        return len(self._roles)

    def get(self, name: str) -> RoleInfo | None:
        """Return the living role of that name."""
        return self._roles.get(name)

    def join(self, role: RoleInfo) -> None:
        """A role has started."""
        self._left.pop(role.name, None)
        self._roles[role.name] = role
        self._starts[role.name] += 1

    def leave(self, role: RoleInfo, reason: str) -> None:
        """A role has ended."""
        del self._roles[role.name]
        self._left[role.name] = (role, reason)
        while len(self._left) > _MAX_LEFT:
            self._forget(next(iter(self._left)))

    def _forget(self, name: str) -> None:
        del self._left[name]
        del self._starts[name]
        self._reports.pop(name, None)

    def report(self, report: RoleReport, now: float) -> None:
        """Keep what a role said, if this life of it was ever heard of here."""
        role = self._roles.get(report.name)
        if role is not None and role.incarnation == report.incarnation:
            self._reports[report.name] = (report, now)

    def statuses(self, now: float, links: Sequence[LinkRow], here: str) -> tuple[RoleStatus, ...]:
        """Return a row per role: those that are up first. `here` is the registry's own name."""
        by_peer = {link.peer: link for link in links}
        up = [self._status(role, now, by_peer, here) for role in self._roles.values()]
        left = [
            self._status(role, now, by_peer, here, reason) for role, reason in self._left.values()
        ]
        return (*up, *left)

    def _status(
        self,
        role: RoleInfo,
        now: float,
        links: dict[str, LinkRow],
        here: str,
        reason: str | None = None,
    ) -> RoleStatus:
        link = links.get(role.name)
        up = reason is None
        report, at = self._reports.get(role.name, (None, now))
        if report is not None and report.incarnation != role.incarnation:
            report = None
        local = role.name == here or link is None  # in this process: as alive as we are
        return RoleStatus(
            role=role,
            up=up,
            connected=up and (local or (link is not None and link.connected)),
            silent_s=link.silent_s if link is not None and up else 0.0,
            num_starts=self._starts[role.name],
            report=report,
            report_age_s=now - at if report is not None else None,
            reason=reason,
        )
