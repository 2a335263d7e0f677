"""The groups and the versions of the model of the buffer: where each is, and the verdicts on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ratchet.config import Config
from ratchet.messages import BatchReady, GroupFinished, RequestBatch
from ratchet.staleness import Position
from ratchet.types import RolloutGroup, VersionRecord


@dataclass
class Group:
    """One prompt group, wherever it is."""

    place: str = "waiting"
    attempt: int = 0
    retries: int = 0
    reissues: int = 0
    holder: tuple[str, str] = ("", "")
    base: int = 0
    lease_end: float = 0.0
    group: RolloutGroup | None = None
    reason: str | None = None
    trained: tuple[int, int] | None = None
    """(version that took the step, step)"""

    @property
    def num_bytes(self) -> int:
        """An int32 a prompt token; an int32, a float32 and a byte a completion token."""
        rollouts = self.group.rollouts if self.group else ()
        return sum(4 * len(r.prompt_ids) + 9 * len(r.completion_ids) for r in rollouts)


@dataclass
class Account:
    """The credit of one life of a worker."""

    incarnation: str
    total: int = 0
    used: int = 0
    version: int = 0
    lapsed: set[tuple[int, int]] = field(default_factory=set)
    """(group, attempt) whose leases have ended, and which have not come to their end"""


class GroupsModel:
    """The state of a buffer, and what becomes of a group."""

    def __init__(self, config: Config, first: VersionRecord) -> None:
        self.config = config.buffer
        self.is_bounded = config.buffer.admission == "bounded"
        self.group_size = config.rollout.group_size
        self.groups: dict[int, Group] = {}
        self.waiting: list[set[int]] = []  # what was given up at one moment is in any order
        self.queue: list[int] = []
        self.largest = 0
        self.accounts: dict[str, Account] = {}
        self.closed: set[tuple[str, str]] = set()
        self.known = {first.version: first}
        self.parked: list[GroupFinished] = []
        self.judged: Position | None = None
        self.next = (first.term, Position(first.version, first.step))
        self.term, self.settled = first.term, 0
        self.request: RequestBatch | None = None
        self.handed: tuple[RequestBatch, list[int]] | None = None
        self.again: BatchReady | None = None
        self.unbroken = True
        """there has been one trainer"""

    def has_room(self, version: int) -> bool:
        """Whether one more group may be open, of a worker that holds a version."""
        flight = [g for g in self.groups.values() if g.place == "flight"]
        num_open = len(flight) + len(self.queue) + 1
        config = self.config
        if num_open > config.capacity:
            return False
        if config.max_bytes is not None and num_open > config.batch_groups:
            size = sum(self.groups[i].num_bytes for i in self.queue)
            size += (len(flight) + 1) * self.largest
            if not self.largest or size > config.max_bytes:
                return False
        if not self.is_bounded:
            return True
        position = self.next[1]
        if not self.knows(position.version, version):
            return False
        age = self._distance(version, position)
        if age > config.max_staleness:
            return False
        # what is trained into versions that the worker does not have yet keeps its place
        kept = config.batch_groups * age
        within = config.batch_groups * (config.max_staleness + 1)
        return num_open <= max(config.batch_groups, min(config.capacity, within) - kept)

    # --- verdicts

    def _judge_finish(self, group_id: int, group: Group) -> None:
        assert group.group is not None
        rollouts = group.group.rollouts
        whole = [r for r in rollouts if r.finish_reason not in {"abort", "error"}]
        if len(whole) < len(rollouts):
            aborted = any(r.finish_reason == "abort" for r in rollouts)
            self._unused(group_id, group, "aborted" if aborted else "generation", bool(whole))
            if group.place != "queued":
                return
        filters = self.config.filters
        if "any_aborted" in filters and len(whole) < len(rollouts):
            self._drop(group_id, group, "filter:any_aborted")
        elif "zero_spread" in filters and len({r.reward for r in whole}) < 2:
            self._drop(group_id, group, "filter:zero_spread")

    def _judge_all(self, position: Position) -> None:
        self.judged = position
        before = len(self.waiting)
        for group_id in list(self.queue):
            self._judge(group_id, self.groups[group_id])
        together = set().union(*self.waiting[before:])
        self.waiting[before:] = [together] if together else []

    def _judge(self, group_id: int, group: Group) -> None:
        assert group.group is not None
        assert self.judged is not None
        bound = self.config.max_staleness
        ages = self._ages(group.group, self.judged)
        if max(ages.values()) <= bound:
            return
        assert not (self.is_bounded and self.unbroken), f"bounded, and {group_id} is stale"
        left = any(
            ages[span.version] <= bound
            for r in group.group.rollouts
            if r.finish_reason not in {"abort", "error"}
            for span in r.spans
        )
        if not (left and group.reason == "stale"):
            self._unused(group_id, group, "stale", left)

    def _unused(self, group_id: int, group: Group, reason: str, left: bool) -> None:
        """The handler's word: `buffer.unused`, within its budget."""
        unused = self.config.unused
        if unused == "retry" and group.retries < self.config.max_retries:
            group.retries += 1
            self._to_wait([group_id], reason)
        elif unused == "mask" and left:
            group.reason = reason
        else:
            self._drop(group_id, group, reason)

    def _drop(self, group_id: int, group: Group, reason: str) -> None:
        group.place, group.reason = "dropped", reason
        self.queue = [i for i in self.queue if i != group_id]

    def _give_up(self, ids: Iterable[int], reason: str = "worker_died") -> None:
        again = []
        for group_id in list(ids):
            group = self.groups[group_id]
            if group.reissues < self.config.max_reissues:
                group.reissues += 1
                again.append(group_id)
            else:
                self._drop(group_id, group, reason)
        self._to_wait(again, reason)

    def _to_wait(self, ids: list[int], reason: str) -> None:
        for group_id in ids:
            group = self.groups[group_id]
            group.place, group.reason = "waiting", reason
            group.attempt += 1
        self.queue = [i for i in self.queue if i not in ids]
        if ids:
            self.waiting.append(set(ids))

    # --- versions

    def knows(self, *versions: int) -> bool:
        """Whether these and all their ancestors were told."""
        return all(self._path(version) for version in versions)

    def _path(self, version: int) -> list[VersionRecord]:
        """The record and its ancestors; nothing if one of them is unknown."""
        path: list[VersionRecord] = []
        above: int | None = version
        while above is not None:
            if above not in self.known:
                return []
            path.append(self.known[above])
            above = path[-1].parent
        return path

    def _distance(self, version: int, position: Position) -> int:
        mine = {r.version: r.step for r in self._path(version)}
        meet = next(r for r in self._path(position.version) if r.version in mine)
        return self.known[version].step + position.step - 2 * meet.step

    def _ages(self, group: RolloutGroup, position: Position) -> dict[int, int]:
        return {version: self._distance(version, position) for version in group.versions}
