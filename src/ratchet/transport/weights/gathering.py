"""The trainer's buckets: each gathered once, into one of two staging buffers, and read by every
lane of a transfer.

Consumes the trainer's parameters on a thread of its own, produces the bucket that a lane asks for.
The thread gathers the first bucket while the engines still come, then the next one while the last
one travels, and waits for a buffer that no lane reads or needs. A bucket travels as far as it has
been gathered. Lanes that keep step lead. One that
is late, or takes much longer than the others while they wait for its buffer, falls behind: the
others go on without waiting for it, and what it missed is gathered again for it when they have
ended. An end or `stop` unblocks everyone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Final, TypeVar

from ratchet.errors import TransferFailed
from ratchet.transport.weights.base import WeightSource
from ratchet.transport.weights.digest import (
    bucket_digest,
    make_trailer,
    whole_digest,
)
from ratchet.transport.weights.gathered import Gathered
from ratchet.transport.weights.plan import slots_by_bucket
from ratchet.types import WeightManifest

if TYPE_CHECKING:
    import torch

    from ratchet.transport.weights.deadline import Deadline

T = TypeVar("T")
_START_S: Final = 1.0
"""The first lane waits so long for the others, and then begins alone."""

_SLOW: Final = 2.0
_SLOW_S: Final = 0.1
"""A lane falls behind when a bucket takes it so many times as long as the last one that arrived
elsewhere, and so many seconds more."""

_POLL_S: Final = 0.02


class Gathering:
    """For one transfer."""

    def __init__(
        self,
        manifest: WeightManifest,
        source: WeightSource,
        allocate: Callable[[], Sequence[torch.Tensor]],
        lanes: Sequence[str],
        large: int,
        *,
        in_place: bool = False,
    ) -> None:
        """Gather nothing yet.

        Args:
            manifest: the plan of the transfer.
            source: the trainer's parameters.
            allocate: returns the two staging buffers, each as large as the largest bucket; called
                on the gathering thread.
            lanes: names of those that will read.
            large: `large_bytes` of their groups.
            in_place: leave large tensors in host memory where they are, and let them travel from
                there.
        """
        self.gather_s = 0.0
        self.num_buckets = len(manifest.bucket_bytes)
        self._manifest = manifest
        self._slots = slots_by_bucket(manifest)
        self._source = source
        self._allocate = allocate
        self._large = large
        self._in_place = in_place
        self._buffers: list[Gathered] = []
        self._digests: dict[int, bytes] = {}
        self._changed = threading.Condition()
        self._lanes = set(lanes)
        self._wants: dict[str, int] = {}
        """the buckets that lanes wait for"""
        self._reads: dict[str, tuple[int, float]] = {}
        """the buckets that travel, and since when"""
        self._kept: set[int] = set()
        """buckets that stay in their buffers until they are released"""
        self._behind: set[str] = set()
        self._pace_s = 0.0
        self._stopped = False

    @property
    def digest(self) -> str:
        """The digest of the version; every bucket must have been gathered."""
        return whole_digest([self._digests[part] for part in range(self.num_buckets)])

    def trailer(self) -> bytes:
        """Return what follows the last bucket; every bucket must have been gathered."""
        return make_trailer(
            self._manifest, [self._digests[part] for part in range(self.num_buckets)]
        )

    def stop(self) -> None:
        """End the thread, and whoever waits for it."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    # --- on the gathering thread

    def run(self) -> None:
        """Gather until every lane has ended.

        Raises:
            TransferFailed: if a parameter is not as announced, or changed meanwhile.
            Exception: from the source.
        """
        self._buffers = [Gathered(memory) for memory in self._allocate()]
        try:
            self._gather(0, self._buffers[0])  # what every transfer begins with
        finally:  # a failure ends the transfer; lanes that have not begun would tell nobody of it
            self._wait_for_lanes()
        while (job := self._next()) is not None:
            self._gather(*job)

    def _gather(self, part: int, buffer: Gathered) -> None:
        start = perf_counter()
        slots = self._slots[part]
        tensors = self._source.read([slot.name for slot in slots])
        size = self._manifest.bucket_bytes[part]
        buffer.num_ready = 0
        tell = partial(self._offer, part, buffer)
        digest = bucket_digest(
            buffer.fill(slots, size, tensors, tell, large=self._large, in_place=self._in_place)
        )
        if self._digests.setdefault(part, digest) != digest:
            msg = f"the trainer's parameters in bucket {part} changed during the transfer"
            raise TransferFailed(msg)
        self._offer(part, buffer, len(buffer.pieces))
        self.gather_s += perf_counter() - start

    def _offer(self, part: int, buffer: Gathered, num_ready: int) -> None:
        with self._changed:
            buffer.part = part
            buffer.num_ready = num_ready
            self._changed.notify_all()

    def _wait_for_lanes(self) -> None:
        def come() -> set[str]:
            return {*self._wants, *self._reads}

        with self._changed:
            self._changed.wait_for(lambda: come() or not self._lanes or self._stopped)
            self._changed.wait_for(lambda: self._lanes <= come() or self._stopped, _START_S)

    def _next(self) -> tuple[int, Gathered] | None:
        """Wait for something to gather, and a buffer for it; return None at the end."""
        with self._changed:
            while self._lanes and not self._stopped:
                choice = self._choose()
                if choice is not None:
                    choice[1].part = None
                    return choice
                self._changed.wait(_POLL_S if self._wants and self._reads else None)
        return None

    def _choose(self) -> tuple[int, Gathered] | None:
        if not (self._wants.keys() | self._reads.keys()) - self._behind:
            self._behind.clear()
        wanted = {part for lane, part in self._wants.items() if lane not in self._behind}
        ahead = {part + 1 for lane, (part, _) in self._reads.items() if lane not in self._behind}
        ahead.discard(self.num_buckets)
        held = {buffer.part for buffer in self._buffers}
        missing = sorted(wanted - held) or sorted(ahead - held)
        if not missing:
            return None
        in_use = wanted | ahead | self._kept | {part for part, _ in self._reads.values()}
        for buffer in self._buffers:
            if buffer.part not in in_use:
                return missing[0], buffer
        self._leave_behind(missing[0])
        return None

    def _leave_behind(self, wanted: int) -> None:
        """Wait no longer for lanes that take too long with a bucket well before this one."""
        limit = monotonic() - _SLOW * self._pace_s - _SLOW_S
        for lane, (part, since) in self._reads.items():
            if part + 1 < wanted and since < limit:
                self._behind.add(lane)

    # --- on the threads of the lanes

    @contextmanager
    def bucket(
        self, lane: str, part: int, deadline: Deadline, *, keep: bool = False
    ) -> Iterator[Gathered]:
        """Wait for a bucket, and hold its buffer while it travels; to keep it is to hold it until
        it is released.

        Raises:
            TransferFailed: if the transfer is over, or the deadline passes first.
        """
        buffer = self._take(lane, part, deadline)
        arrived = False
        try:
            yield buffer
            arrived = True
        finally:
            with self._changed:
                _, since = self._reads.pop(lane)
                if keep:
                    self._kept.add(part)
                if arrived:
                    self._pace_s = monotonic() - since
                    if part + 1 < self.num_buckets:
                        self._wants[lane] = part + 1
                self._changed.notify_all()

    def coming(self, buffer: Gathered, deadline: Deadline) -> Iterator[int]:
        """Yield the number of each piece of a bucket that is held, when it has been gathered.

        Raises:
            TransferFailed: if the transfer is over, or the deadline passes first.
        """
        given = 0
        while given < len(buffer.pieces):
            if given == buffer.num_ready:
                with self._changed:
                    self._wait(partial(_has_more, buffer, given), deadline)
            ready = buffer.num_ready
            yield from range(given, ready)
            given = ready

    def release(self, part: int) -> None:
        """Let go of a bucket that was kept."""
        with self._changed:
            self._kept.discard(part)
            self._changed.notify_all()

    def has_others(self, lane: str) -> bool:
        """Return whether another lane still reads."""
        with self._changed:
            return bool(self._lanes - {lane})

    def end(self, lane: str) -> None:
        """Say that a lane reads no more."""
        with self._changed:
            self._lanes.discard(lane)
            self._wants.pop(lane, None)
            self._changed.notify_all()

    def _take(self, lane: str, part: int, deadline: Deadline) -> Gathered:
        with self._changed:
            if lane not in self._wants:
                self._join(lane, part)
            try:
                buffer = self._wait(lambda: self._find(part), deadline)
            finally:
                del self._wants[lane]
            self._reads[lane] = (part, monotonic())
            self._changed.notify_all()
            return buffer

    def _wait(self, condition: Callable[[], T | None], deadline: Deadline) -> T:
        found = self._changed.wait_for(lambda: self._stopped or condition(), deadline.left_s)
        value = condition()
        if not value or self._stopped:
            late = f"the trainer's parameters were not read within {deadline.timeout_s:g} s"
            raise TransferFailed(late if not found else "the transfer was given up")
        return value

    def _join(self, lane: str, part: int) -> None:
        """Begin to want; a lane that comes late to a bucket does not hold the others up."""
        others = [*self._wants.items(), *((at, p) for at, (p, _) in self._reads.items())]
        leading = [at for name, at in others if name not in self._behind]
        if self._digests and leading and part < min(leading):
            self._behind.add(lane)
        self._wants[lane] = part
        self._changed.notify_all()

    def _find(self, part: int) -> Gathered | None:
        return next((buffer for buffer in self._buffers if buffer.part == part), None)


def _has_more(buffer: Gathered, given: int) -> bool:
    return buffer.num_ready > given
