"""What a role's process tells the registry of itself, once per `runtime.heartbeat_s`.

Consumes the tables of its own process (mailboxes, facts of the actor, waits, links, dead letters)
and how late the event loop wakes it; produces a `RoleReported`. Waits for its own timer and for
nobody. While the link to the registry is down it tells nothing: what waited there would be old when
it arrives, and each report replaces the one before. All time is the loop's own clock.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ratchet.actors.role import REGISTRY
from ratchet.actors.system import System
from ratchet.messages import RoleReported
from ratchet.runtime.visitor import VISITOR
from ratchet.status import LinkRow, RoleReport, WaitRow
from ratchet.transport.mailbox.base import Wait
from ratchet.types import RoleInfo

_SAMPLES: Final = 4
"""Wake-ups per report: a loop that is held up for a quarter of the heartbeat is always seen."""
_MOST_LETTERS: Final = 20
_MOST_WAITS: Final = 64
_MOST_LINKS: Final = 64


class Reporter:
    """Reports from the moment it is started, on the running loop, until it is stopped.

    Args:
        system: what the actors of the process share.
        role: the one that the process is for.
        every_s: seconds between two reports.
        open_asks: the asks of this process that wait for another one, `Node.waits`.
    """

    def __init__(
        self,
        system: System,
        role: RoleInfo,
        *,
        every_s: float,
        open_asks: Callable[[], Iterable[Wait]] = tuple,
    ) -> None:
        self._system = system
        self._role = role
        self._every_s = every_s
        self._open_asks = open_asks
        self._loop = asyncio.get_running_loop()
        self._started = self._due = self._next = self._loop.time()
        self._lag_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin; the first report follows at once."""
        self._arm(self._loop.time())

    def stop(self) -> None:
        """Report no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, now: float) -> None:
        self._due = now + self._every_s / _SAMPLES
        self._timer = self._loop.call_at(self._due, self._wake)

    def _wake(self) -> None:
        now = self._loop.time()
        self._lag_s = max(self._lag_s, now - self._due)
        self._arm(now)  # first, so that a report that fails is told by the loop, and not the last
        if now >= self._next:
            self._next = now + self._every_s * (1 - 0.5 / _SAMPLES)
            if self._reachable():
                self._system.ref(REGISTRY).tell(RoleReported(self.report()))

    def _reachable(self) -> bool:
        return all(link.connected for link in self._system.links() if link.peer == REGISTRY)

    def report(self) -> RoleReport:
        """Gather a report; the lag is counted anew from here."""
        system, now = self._system, self._loop.time()
        lag_s, self._lag_s = self._lag_s, 0.0
        waits = join_waits(system.waits.rows(), self._open_asks())
        return RoleReport(
            kind=self._role.kind,
            name=self._role.name,
            incarnation=self._role.incarnation,
            pid=os.getpid(),
            host=socket.gethostname(),
            uptime_s=now - self._started,
            loop_lag_s=lag_s,
            mailboxes=system.depths(),
            facts=system.facts(self._role.name),
            waits=tuple(
                WaitRow(wait.who, wait.on, wait.what, now - wait.since, wait.until - now)
                for wait in waits[:_MOST_WAITS]
            ),
            links=_worst_first(system.links())[:_MOST_LINKS],
            num_dead_letters=system.dead_letters.total,
            dead_letters=system.dead_letters.most_frequent(_MOST_LETTERS),
        )


def join_waits(rows: Sequence[Wait], asks: Iterable[Wait]) -> list[Wait]:
    """Join the actors' waits with the open asks of the node, oldest first.

    An ask of an actor to another process is in both, once each: begun in the same moment, under one
    name. Of each name the asks that an actor's row does not account for are added; the row that is
    nearest in time accounts for an ask.
    """
    by_name: defaultdict[tuple[str, str, str], list[Wait]] = defaultdict(list)
    for ask in asks:
        by_name[ask.who, ask.on, ask.what].append(ask)
    for row in rows:
        same = by_name.get((row.who, row.on, row.what))
        if same:
            same.remove(min(same, key=lambda ask: abs(ask.since - row.since)))
    left = (ask for same in by_name.values() for ask in same)
    return sorted([*rows, *left], key=lambda wait: wait.since)


def _worst_first(links: Sequence[LinkRow]) -> tuple[LinkRow, ...]:
    """Order links such that the interesting ones come first; visitors come and go."""
    return tuple(
        sorted(
            (link for link in links if not link.peer.startswith(VISITOR)),
            key=lambda link: (link.connected, link.trouble is None, -link.num_queued),
        )
    )
