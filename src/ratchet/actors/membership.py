"""Who is alive: the registry's knowledge of the roles of a run. Pure; the clock is the caller's.

Consumes joins, leaves, reports and the state of the links; produces the rows of `ratchet status`,
and the news that a role has fallen silent or responds again. Two facts are kept apart: whether a
role's process is there (a connection to it is open), and whether its loop responds (how long
nothing was heard of it). A role is suspected here and nowhere given up: that is the link's to say,
by a `Down`, and then the role leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from ratchet.status import LinkRow, RoleReport, RoleStatus
from ratchet.types import RoleInfo

_MAX_LEFT: Final = 64
"""Roles that left and are still shown, the last ones."""
_MAX_STARTING: Final = 256
_MAX_ENDED: Final = 4096
_ENGINES: Final = ("rollout", "evaluator", "producer")
"""The many: they talk to all others, and never to each other."""


class Suspicion(NamedTuple):
    """A role has fallen silent, or responds again."""

    role: RoleInfo
    silent: bool
    connected: bool
    silent_s: float
    """how long nothing is heard of it; how long nothing was, for one that responds again"""


class Membership:
    """The living roles by name, and what each has said last.

    Args:
        me: the registry itself; it is shown, and is none of the roles that join and leave.
        suspect_s: silence after which a role is suspected.
    """

    def __init__(self, me: RoleInfo, suspect_s: float) -> None:
        self._me = me
        self.suspect_s = suspect_s
        self._roles: dict[str, RoleInfo] = {}
        self._few: dict[str, RoleInfo] = {}  # those of them that are no engines
        self._left: dict[str, tuple[RoleInfo, str]] = {}
        self._ended: dict[str, tuple[str, str]] = {}  # the last life of a name that left, and why
        self._starting: dict[str, RoleInfo] = {}  # they report, and have not registered
        self._reports: dict[str, tuple[RoleReport, float]] = {}
        self._starts: Counter[str] = Counter()
        self._cut_at: dict[str, float] = {}  # since when a role's link was seen to be down
        self._suspected: dict[RoleInfo, float] = {}  # with the silence that was last seen

    def __iter__(self) -> Iterator[RoleInfo]:
        """The living, in the order in which they joined."""
        return iter(tuple(self._roles.values()))

    def __len__(self) -> int:
        return len(self._roles)

    def get(self, name: str) -> RoleInfo | None:
        """Return the living role of that name."""
        return self._roles.get(name)

    def end_of(self, role: RoleInfo) -> str | None:
        """Return why this life of a role has left; None if it has not, as far as is known here."""
        life, reason = self._ended.get(role.name, ("", ""))
        return reason if life == role.incarnation else None

    def who_hears_of(self, role: RoleInfo) -> tuple[RoleInfo, ...]:
        """Return the living that have to do with a role: all, but no engine with another one.

        News of each engine to each other one would cost the square of their number.
        """
        roles = self._few if role.kind in _ENGINES else self._roles
        return tuple(roles.values())

    def join(self, role: RoleInfo) -> None:
        """A role has started."""
        self._left.pop(role.name, None)
        starting = self._starting.pop(role.name, None)
        if starting is None or starting.incarnation != role.incarnation:
            self._reports.pop(role.name, None)
        self._roles[role.name] = role
        if role.kind not in _ENGINES:
            self._few[role.name] = role
        self._starts[role.name] += 1

    def leave(self, role: RoleInfo, reason: str) -> None:
        """A role has ended."""
        del self._roles[role.name]
        self._few.pop(role.name, None)
        self._suspected.pop(role, None)
        self._cut_at.pop(role.name, None)
        self._left[role.name] = (role, reason)
        self._ended.pop(role.name, None)
        self._ended[role.name] = (role.incarnation, reason)
        while len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        while len(self._left) > _MAX_LEFT:
            self._forget(next(iter(self._left)))

    def _forget(self, name: str) -> None:
        del self._left[name]
        del self._starts[name]
        self._reports.pop(name, None)

    def report(self, report: RoleReport, now: float) -> None:
        """Keep what a role said, if it is of that life of it that is up, or of one that starts."""
        role = self._me if report.name == self._me.name else self._roles.get(report.name)
        if role is None:
            self._report_start(report, now)
        elif role is self._me or role.incarnation == report.incarnation:
            self._reports[report.name] = (report, now)

    def _report_start(self, report: RoleReport, now: float) -> None:
        left = self._left.get(report.name)
        if left is not None and left[0].incarnation == report.incarnation:
            return  # its last words
        if report.name in self._starting or len(self._starting) < _MAX_STARTING:
            self._starting[report.name] = RoleInfo(report.kind, report.name, report.incarnation)
            self._reports[report.name] = (report, now)

    def listen(self, links: Sequence[LinkRow], now: float) -> list[Suspicion]:
        """Look at the links; return who has fallen silent since the last look, and who responds
        again. To be called every second or so, or whenever somebody wants to know.
        """
        news = []
        by_peer = {link.peer: link for link in links}
        for role in self._roles.values():
            link = by_peer.get(role.name)
            if link is None:
                continue
            if link.connected:
                self._cut_at.pop(role.name, None)
            else:
                self._cut_at.setdefault(role.name, now)
            silent_s, was = self._silence(role, link, now), self._suspected.get(role)
            if silent_s >= self.suspect_s:
                if was is None:
                    news.append(Suspicion(role, True, link.connected, silent_s))
                self._suspected[role] = silent_s
            elif was is not None:
                del self._suspected[role]
                news.append(Suspicion(role, False, link.connected, was))
        return news

    def statuses(self, now: float, links: Sequence[LinkRow]) -> tuple[RoleStatus, ...]:
        """Return a row per role: this registry, those that are up, that start, and that left."""
        by_peer = {link.peer: link for link in links}
        up = [self._status(role, now, by_peer) for role in (self._me, *self._roles.values())]
        starting = [
            self._status(role, now, by_peer, up=False)
            for name, role in self._starting.items()
            if name not in by_peer or by_peer[name].connected  # one that is gone never was
        ]
        shown = {status.role.name for status in starting}
        left = [
            self._status(role, now, by_peer, up=False, reason=reason)
            for name, (role, reason) in self._left.items()
            if name not in shown
        ]
        return (*up, *starting, *left)

    def _silence(self, role: RoleInfo, link: LinkRow, now: float) -> float:
        return link.silent_s if link.connected else now - self._cut_at.get(role.name, now)

    def _status(
        self,
        role: RoleInfo,
        now: float,
        links: Mapping[str, LinkRow],
        *,
        up: bool = True,
        reason: str | None = None,
    ) -> RoleStatus:
        link = links.get(role.name)  # none to a role in this process: it is as alive as we are
        here = reason is None
        silent_s = self._silence(role, link, now) if here and link is not None else 0.0
        report, at = self._reports.get(role.name, (None, now))
        return RoleStatus(
            role=role,
            up=up,
            connected=here and (link is None or link.connected),
            silent_s=silent_s,
            suspected=silent_s >= self.suspect_s,
            num_starts=max(1, self._starts[role.name] + (here and not up)),
            report=report,
            report_age_s=None if report is None else now - at,
            reason=reason,
        )
