"""The trainer's side of one engine whose servers take part themselves: its lane in a transfer.

Consumes whole gathered buckets, produces an engine that has them all, or why it has not. Waits as a
lane does. There is one round only: what such a server was sent is in its model at once, so that an
engine whose group breaks holds parts of two versions, and begins again with the next transfer. Its
worker comes back when the servers have taken everything, and is given the trailer then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ratchet.errors import TransferFailed
from ratchet.transport.weights.groups import Group
from ratchet.transport.weights.lane import Lane
from ratchet.transport.weights.meeting import Go, Ready
from ratchet.transport.weights.outside import stretches_of
from ratchet.types import TensorSlot


class DirectLane(Lane):
    """For one transfer and one engine."""

    def __init__(self, slots: Sequence[Sequence[TensorSlot]], *args: Any) -> None:
        """Begin nothing yet, as every lane.

        Args:
            slots: of each bucket, by offset.
            args: of every lane.
        """
        super().__init__(*args)
        self._stretches = [stretches_of(each) for each in slots]
        self._sent = False

    def _serve(self, came: dict[int, Ready]) -> None:
        for rank, ready in came.items():
            if self._sent and ready.has == self._gathering.num_buckets:
                trailer = self._gathering.trailer()
                self._answer(self._number, rank, Go(self.link.holds, trailer=trailer))
            elif ready.has or self._number > 1:
                self._lose(rank, f"{self._broke}its servers hold parts of two versions")
            elif not ready.outside:
                self._lose(rank, "it has no server that could take weights from the trainer")
            else:
                self._send(rank, ready)

    def _send(self, rank: int, ready: Ready) -> None:
        """Send every bucket; the link may be given up meanwhile, and a group that the servers were
        asked to join is entered all the same, so that they do not wait for it.
        """
        holds = self.link.holds
        members = (self._engines[rank],)
        is_held = self.link.members == members and ready.holds == holds
        name = holds if holds and is_held else f"{self._plan.point}.{self._number}"
        self._answer(self._number, rank, Go(name))
        try:
            limit = self._deadline.within(self._limit_s)
            group = self.link.enter_outside(name, self._plan.backend, ready.outside, limit)
            self.link.members = members
            self._send_stretches(group)
        except TransferFailed as error:
            self._broke = f"its connection broke ({error}), and "
            self.link.leave()
        else:
            self._sent = True
            self._broke = "everything was sent, and "

    def _send_stretches(self, group: Group) -> None:
        """Send all buckets.

        Raises:
            TransferFailed: if a server was lost, a bucket took too long or the link was abandoned.
        """
        for part, stretches in enumerate(self._stretches):
            with self._gathering.bucket(self._plan.point, part, self._deadline) as gathered:
                for _ in self._gathering.coming(gathered, self._deadline):
                    self.link.check()
                limit = self._deadline.within(self._limit_s)
                waits = [
                    group.move(gathered.memory[each.start : each.end], limit) for each in stretches
                ]
                for wait in waits:
                    wait()
