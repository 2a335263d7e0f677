"""The trainer's side of one group of engines in one transfer: its rounds, until each engine has
everything or is lost.

Consumes gathered buckets, produces the engines that got them and why the others did not. Runs on
the thread of its link. Waits at a meeting for its engines, for a part of the transfer's time, and
in a round for its group, for as long for each bucket; `Link.abandon` unblocks the meeting, and the
round at its next bucket.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import NamedTuple

from ratchet.errors import TransferFailed
from ratchet.transport.weights.deadline import Deadline
from ratchet.transport.weights.gathering import Gathering
from ratchet.transport.weights.groups import Group
from ratchet.transport.weights.link import Link
from ratchet.transport.weights.meeting import Answers, Go, Ready, gather_ready, patience_s
from ratchet.transport.weights.stream import send_round


class LanePlan(NamedTuple):
    """Which engines travel together."""

    point: str
    """the name under which they meet; never used twice"""
    backend: str
    engines: tuple[str, ...]
    """by the rank of their route, from rank 1"""


class Lane:
    """For one transfer."""

    def __init__(
        self,
        plan: LanePlan,
        link: Link,
        gathering: Gathering,
        answers: Answers,
        left: Mapping[str, str],
        deadline: Deadline,
    ) -> None:
        """Begin nothing yet.

        Args:
            plan: the engines.
            link: the trainer's, which may hold their group from an earlier transfer.
            gathering: the buckets.
            answers: the trainer's.
            left: engines that will not come, and why; may grow meanwhile.
            deadline: of the transfer.
        """
        self.link = link
        self.lost: dict[str, str] = {}
        """engines that did not get everything, and why"""
        self.hosts: dict[str, str] = {}
        """which memory those who came could share with the trainer"""
        self._plan = plan
        self._gathering = gathering
        self._answers = answers
        self._left = left
        self._deadline = deadline
        self._limit_s = patience_s(deadline.timeout_s)
        self._engines = dict(enumerate(plan.engines, 1))
        """those that still lack something, by the rank of their route"""
        self._number = 0
        """of the round"""
        self._broke = ""
        """how the last round did"""

    def run(self) -> None:
        """Serve the engines.

        Raises:
            TransferFailed: if the link was abandoned.
        """
        try:
            while self._engines:
                self._number += 1
                came = self._meet()
                if came:
                    self._serve(came)
        finally:
            self._gathering.end(self._plan.point)
            with contextlib.suppress(TransferFailed):  # the store has gone with its trainer
                self._give_up()

    def _meet(self) -> dict[int, Ready]:
        """Return what the engines that lack something say."""
        self.link.check()
        self.link.store(self._deadline)  # to connect takes nobody's time but the trainer's
        deadline = self._deadline.within(self._limit_s)
        came, lost = gather_ready(
            self.link, self._plan.point, self._number, self._engines, self._left, deadline
        )
        self.hosts |= {self._engines[rank]: ready.host for rank, ready in came.items()}
        for rank, reason in lost.items():
            self._lose(rank, f"{self._broke}{reason}")
        for rank, ready in list(came.items()):
            if ready.has > self._gathering.num_buckets:
                del self._engines[rank], came[rank]
        return came

    def _lose(self, rank: int, reason: str) -> None:
        self.lost[self._engines.pop(rank)] = reason
        self._answer(self._number, rank, _without(reason))

    def _serve(self, came: dict[int, Ready]) -> None:
        """Send to those who came what they lack, as far as the group carries."""
        first = min(ready.has for ready in came.values())
        try:
            group = self._enter(came, first)
            send_round(
                self.link,
                group,
                self._gathering,
                self._plan.point,
                first,
                self._deadline,
                self._limit_s,
            )
        except TransferFailed as error:
            self._broke = f"its connection broke ({error}), and "
            self.link.leave()
        else:
            self._broke = "everything was sent, and "

    def _enter(self, came: dict[int, Ready], first: int) -> Group:
        """Enter a group with those who came: the last one if all of them still hold it."""
        ranks = sorted(came)
        members = tuple(self._engines[rank] for rank in ranks)
        holds = self.link.holds
        is_held = self.link.members == members and {r.holds for r in came.values()} == {holds}
        name = holds if holds and is_held else f"{self._plan.point}.{self._number}"
        size = len(ranks) + 1
        for place, rank in enumerate(ranks, 1):
            self._answer(self._number, rank, Go(name, place, size, first))
        limit = self._deadline.within(self._limit_s)
        group = self.link.enter(name, self._plan.backend, 0, size, limit)
        self.link.members = members
        return group

    def _give_up(self) -> None:
        """Answer those who would wait for a round that never comes."""
        for rank in self._engines:
            for number in (self._number, self._number + 1):
                self._answer(number, rank, Go(None, failure="the transfer was given up"))

    def _answer(self, number: int, rank: int, go: Go) -> None:
        store = self.link.store(self._deadline)
        self._answers.give(store, self._plan.point, number, rank, go)


def _without(reason: str) -> Go:
    return Go(None, failure=f"the transfer goes on without this engine: {reason}")
