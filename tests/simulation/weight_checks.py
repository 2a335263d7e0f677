"""What must hold of engines and their weights, from what can be seen of them and of what was sent.

Consumes a world at each delivered message and at its end; produces what is wrong. Waits for
nothing. The digest of a version is computed here by the book, beside the code that sends it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import xxhash
from tests.simulation.weight_ends import NUM_PARTS, PART, PART_MIB

from ratchet.messages import CommitVersion, Message, WeightsLoaded

if TYPE_CHECKING:
    import numpy as np
    from tests.simulation.lives import Worker
    from tests.simulation.plan import Plan
    from tests.simulation.world import World

_ENDS_S = 15.0
"""A load ends so much later than its transfer's time, with the slowest of engines."""

_DIFFERS = (
    "damaged on the way",
    "is not what the trainer sent",
    "the trailer came before",
    "in the place of the trailer",
    "was announced, and version",
)
"""What an engine says when it has got other weights than its own."""

Problem = tuple[str, str]


class WeightChecks:
    """Looks at one world."""

    def __init__(self, plan: Plan, world: World) -> None:
        self._world = world
        self._plan = plan
        self._sent: dict[int, tuple[bytes, str]] = {}
        """of each version: the bytes, and their digest"""
        self._paused_since: dict[str, float] = {}
        self._without_since: dict[str, float] = {}
        """since when an engine has no version"""

    def told(self, message: Message) -> Iterator[Problem]:
        """What one message says is so."""
        if isinstance(message, WeightsLoaded | CommitVersion):
            _, digest = self._of(message.version)
            if message.digest != digest:
                yield "I4", f"{message}, and the digest of what was sent is {digest}"

    def check(self) -> Iterator[Problem]:
        """Look at every engine, and at what the trainer believes of them."""
        for worker in self._world.lives:
            if worker.host.lives:
                yield from self._engine(worker)
        publisher = self._world.leader.actor._publisher
        if publisher.live is not None and self._world.leader.host.lives:
            lives = {life.incarnation: life for life in self._world.lives}
            for role in publisher.holders.values():
                stamped = {version for version, _ in lives[role.incarnation].engine.stamped}
                if publisher.live not in stamped:
                    yield "I4", f"{role.incarnation} never held {publisher.live}, and counts as one"

    def _engine(self, worker: Worker) -> Iterator[Problem]:
        engine, key, now = worker.engine, worker.incarnation, self._world.network.loop.now
        if engine.version is not None:
            self._without_since.pop(key, None)
            if engine._weights.tobytes() != self._of(engine.version)[0]:
                yield "I4", f"{key} generates as version {engine.version} with other weights"
        else:
            self._without_since.setdefault(key, now)
        if not engine._paused:
            self._paused_since.pop(key, None)
            return
        if not worker.receiver.loads:
            yield "I7", f"{key} is paused, and nothing loads"
        since = max(self._paused_since.setdefault(key, now), worker.host.thawed_at)
        most_s = (self._plan.config.weights.timeout_s + _ENDS_S) * 1.05  # its clock may be slow
        if worker.host.process.runs and now > since + most_s:
            yield "I7", f"{key} is paused since {since:.3f} s"

    def at_end(self) -> Iterator[Problem]:
        """What can only be said of a whole run."""
        yield from self._all_damage_was_done()
        yield from self._nobody_is_left_without()

    def _all_damage_was_done(self) -> Iterator[Problem]:
        """No engine refuses weights that nothing has changed."""
        refused = [
            fields["detail"]
            for log in self._world.logs.values()
            for _, event, fields in log.events
            if event == "load_failed" and any(word in fields["detail"] for word in _DIFFERS)
        ]
        if len(refused) > self._world.wire.num_damaged:
            yield "I4", f"{self._world.wire.num_damaged} transfers were damaged: {refused}"

    def _nobody_is_left_without(self) -> Iterator[Problem]:
        """Once faults stop, a live version comes to every engine."""
        limits, timeout_s = self._world.network.limits, self._plan.config.weights.timeout_s
        within_s = 2 * limits.dead_s + 3 * timeout_s + 100.0
        leader = self._world.leader
        end = leader.end.at if leader.end.event.is_set() else self._world.network.loop.now
        quiet = max((self._over(fault) for fault in self._plan.faults), default=0.0)
        live = leader.actor._publisher.live
        for worker in self._world.workers.values():
            if worker.name.startswith("evaluator"):  # it takes one when it has something to do
                continue
            since = max(self._without_since.get(worker.incarnation, end), quiet, worker.started)
            if live is not None and worker.host.lives and end > since + within_s:
                yield "I7", f"{worker.incarnation} has no version since {since:.3f} s"

    def _over(self, fault: object) -> float:
        at: float = getattr(fault, "at", 0.0)
        for_s: float = getattr(fault, "for_s", getattr(fault, "every_s", 0.0))
        return at + for_s * getattr(fault, "times", 1)

    def _of(self, version: int) -> tuple[bytes, str]:
        if version not in self._sent:
            sent = self._world.wire.sent.get(version)
            if sent is None:
                return b"", "of nothing"
            self._sent[version] = sent.tobytes(), self._digest(sent)
        return self._sent[version]

    def _digest(self, weights: np.ndarray) -> str:
        size = max(1, round(self._plan.config.weights.bucket_mib / PART_MIB))
        parts = [weights[i * PART : (i + 1) * PART].tobytes() for i in range(NUM_PARTS)]
        each = [xxhash.xxh3_128_digest(part) for part in parts]
        buckets = [
            xxhash.xxh3_128_digest(b"".join(each[i : i + size])) for i in range(0, NUM_PARTS, size)
        ]
        return xxhash.xxh3_128_hexdigest(b"".join(buckets))
