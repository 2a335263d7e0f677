"""The trainer's side of the engines on its own host: who they are, and their lane in a transfer.

A lane that goes through shared memory. Consumes buckets that are gathered straight into that
memory, and keeps each there until every engine has freed it. Waits as a lane does; and in the end,
where other lanes want the memory, for the engines to be through with the last buckets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ratchet.transport.weights.lane import Lane
from ratchet.transport.weights.meeting import Go, Ready
from ratchet.transport.weights.shared import SharedRing, Sharing
from ratchet.transport.weights.shared_door import host_id
from ratchet.transport.weights.staging import NUM_STAGING

if TYPE_CHECKING:
    import torch

    from ratchet.types import WeightManifest

_MOST_NEWS: Final = 64
"""How often an engine is told how far a bucket is: its socket holds all of that."""


class Neighbours:
    """The engines on the trainer's own host, which say so in their first transfer, and the memory
    for those that follow.
    """

    def __init__(self, *, is_on: bool) -> None:
        self.ring: SharedRing | None = None
        """for the lane that is planned; there is one at a time"""
        self.failure = ""
        """why neighbours go through a group all the same, if they do"""
        self._host = host_id() if is_on else ""
        self._known: set[str] = set()

    def share(self, manifest: WeightManifest, engines: Sequence[str]) -> tuple[str, ...]:
        """Return the engines that a transfer can reach through memory, which is reserved."""
        self.failure = ""
        self._known.intersection_update(engines)
        try:
            if self._known:
                self.ring = self.ring or SharedRing()
                self.ring.reserve(manifest)
        except OSError as error:
            self.failure = str(error)
            return ()
        return tuple(engine for engine in engines if engine in self._known)

    def slots(self) -> Sequence[torch.Tensor]:
        """Return what the buckets of the planned transfer are gathered into."""
        return () if self.ring is None else self.ring.slots

    def note(self, lanes: Iterable[Lane]) -> None:
        """Learn from a transfer who is here; who was lost goes through a group next time."""
        for lane in lanes:
            self._known.update(e for e, host in lane.hosts.items() if host and host == self._host)
            self._known.difference_update(lane.lost)

    def forget(self) -> None:
        """Leave the ring to a lane that may be stuck; its link closes it."""
        self.ring = None

    def close(self) -> None:
        """Give the memory up."""
        if self.ring is not None:
            self.ring.close()
        self.ring = None


class SharedLane(Lane):
    """For one transfer."""

    def __init__(self, *args: Any) -> None:
        """Begin nothing yet, as every lane."""
        super().__init__(*args)
        self._kept: deque[int] = deque()
        """buckets that some engine may still read"""

    def run(self) -> None:
        """Serve the engines.

        Raises:
            TransferFailed: if the link was abandoned.
        """
        done = False
        try:
            super().run()
            done = True
        finally:
            if not done:
                self._ring().leave()

    def _serve(self, came: dict[int, Ready]) -> None:
        """Send to those who came. There is one round only: the buckets that an engine lost hold of
        may have been overwritten before it was through with them.
        """
        ring = self._ring()
        sharing = ring.open(self._plan.point, came)
        for rank, ready in came.items():
            if ready.has:
                sharing.lose(rank, "it came back, and the memory has moved on")
            else:
                self._answer(self._number, rank, Go(self._plan.point, shared=ring.address))
        self._send(sharing)
        for rank, reason in sharing.lost.items():
            self._lose(rank, reason)
        self._broke = "everything was sent, and "
        if self._gathering.has_others(self._plan.point):
            self._free(sharing)

    def _ring(self) -> SharedRing:
        if self.link.ring is None:
            msg = "the link has no memory to share"
            raise RuntimeError(msg)
        return self.link.ring

    def _send(self, sharing: Sharing) -> None:
        gathering = self._gathering
        starts = [slot.data_ptr() for slot in sharing.slots]
        for part in range(gathering.num_buckets):
            limit = self._deadline.within(self._limit_s)
            sharing.wait_for_room(part + 1, limit, partial(self._look, sharing))
            if not sharing.ranks:
                return
            if len(self._kept) == NUM_STAGING:
                gathering.release(self._kept.popleft())
            with gathering.bucket(self._plan.point, part, self._deadline, keep=True) as gathered:
                slot = starts.index(gathered.memory.data_ptr())
                told, size = 0, gathered.ends[-1]
                for number in gathering.coming(gathered, self._deadline):
                    end = gathered.ends[number]
                    if (end - told) * _MOST_NEWS >= size or end == size:
                        sharing.publish(part, slot, end)
                        told = end
            self._kept.append(part)
        sharing.publish_trailer(gathering.num_buckets, gathering.trailer())

    def _look(self, sharing: Sharing) -> None:
        """Raise if nobody wants this any more; go on without engines that have left."""
        self.link.check()
        for rank, engine in self._engines.items():
            if engine in self._left:
                sharing.lose(rank, self._left[engine])

    def _free(self, sharing: Sharing) -> None:
        """Let the other lanes have the memory once every engine is through with it, and not
        before.
        """
        if sharing.wait_until_read(self._deadline, self.link.check):
            for part in self._kept:
                self._gathering.release(part)
