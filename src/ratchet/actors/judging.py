"""Puts the verdicts on groups into effect: at finish, when the weights change, and at the step.

Consumes finished groups, failures, rejections, and where the trainer stands; changes the group
table. Waits for nothing: whoever calls sees to it that the versions are known.

Staleness is judged for a set of versions, once for all the queued groups that it made: whatever is
too old leaves when a version or a request says so, and holds no room until it would be fetched.
"""

from __future__ import annotations

from collections.abc import Sequence

from ratchet.actors.entry import Entry
from ratchet.actors.filters import Watch, mask_aborted, unwatched
from ratchet.actors.group_table import GroupTable
from ratchet.actors.verdicts import KEEP, Verdict, Verdicts
from ratchet.config import BufferConfig
from ratchet.messages import GroupFailed
from ratchet.observability.logs import Log
from ratchet.staleness import Lineage, Position
from ratchet.stats import Distribution, Tally
from ratchet.types import PolicyVersion, RolloutGroup


class Judging:
    """The verdicts of one buffer.

    Args:
        config: of the buffer.
        table: of the groups.
        lineage: of the weights.
        log: where it is said what failed, and what was stale.
        watch: of the calls of code of the user's own.

    Raises:
        ConfigError: if a filter or a handler of the configuration cannot be loaded.
    """

    def __init__(
        self,
        config: BufferConfig,
        table: GroupTable,
        lineage: Lineage,
        log: Log,
        watch: Watch = unwatched,
    ) -> None:
        self._verdicts = Verdicts(config, watch)
        self._max_staleness = config.max_staleness
        self._table = table
        self._lineage = lineage
        self._log = log
        self._position: Position | None = None
        """the last one that was judged for"""

    def finish(
        self, entry: Entry, group: RolloutGroup, versions: tuple[PolicyVersion, ...]
    ) -> bool:
        """Queue a claimed group, made by these versions, and judge it; return whether it stays."""
        self._table.finish(entry, group, versions)
        return self._admit(entry, group, versions)

    def requeue(self, entry: Entry, group: RolloutGroup) -> bool:
        """Queue a group that was stored, and judge it as when it first finished."""
        versions = group.versions
        self._table.requeue(entry, group, versions)
        return self._admit(entry, group, versions)

    def _admit(
        self, entry: Entry, group: RolloutGroup, versions: tuple[PolicyVersion, ...]
    ) -> bool:
        self._apply(entry, self._verdicts.at_finish(entry))
        if entry.masked:
            entry.group = mask_aborted(group)
        position = self._position
        # a token of a newer version than the position's own: that position is out of date
        if (
            entry in self._table.queue
            and position is not None
            and max(versions, default=0) <= position.version
        ):
            staleness = self._staleness(versions, position)
            if self._is_past(staleness):
                self._judge(entry, staleness)
        stays = entry in self._table.queue
        if stays:
            self._table.stored.keep(entry, group)
        return stays

    def fail(self, entry: Entry, message: GroupFailed) -> None:
        """Judge a claimed group that has no rollouts."""
        self._log.warning(
            "group_failed",
            group=message.group_id,
            attempt=message.attempt,
            worker=message.worker,
            reason=message.reason,
            detail=message.detail,
        )
        self._apply(entry, self._verdicts.at_failure(entry, message.reason, message.detail))

    def reject(self, group_id: int, reason: str) -> None:
        """Judge a group of the batch that its step did not use."""
        entry = self._table.rejected(group_id)
        if reason == "stale":
            self._table.window.rejected_staleness.count(entry.staleness)
        self._apply(entry, self._verdicts.at_step(entry, reason))

    def published(self, position: Position) -> None:
        """Judge for a version that is live, unless it is older than what was judged for: this news
        and a trainer's request come over different links.
        """
        if self._position is None or position > self._position:
            self.purge(position)

    def purge(self, position: Position) -> None:
        """Judge everything that is queued for the weights that train next."""
        self._position = position
        for versions in self._table.queue.sets_of_versions():
            staleness = self._staleness(versions, position)
            if self._is_past(staleness):
                for entry in self._table.queue.made_by(versions):
                    self._judge(entry, staleness)

    def note_staleness(self, entries: Sequence[Entry], position: Position) -> None:
        """Write into each entry the staleness of its oldest token that is trained."""
        known: dict[tuple[PolicyVersion, ...], int] = {}
        for entry in entries:
            if entry.versions not in known:
                known[entry.versions] = self._trained_staleness(entry.versions, position)
            entry.staleness = known[entry.versions]

    def queue_staleness(self, position: Position) -> Distribution:
        """Return the same of all that is queued."""
        tally = Tally()
        for versions in self._table.queue.sets_of_versions():
            number = self._table.queue.num_made_by(versions)
            tally.count(self._trained_staleness(versions, position), number)
        return tally.read()

    def _trained_staleness(self, versions: tuple[PolicyVersion, ...], position: Position) -> int:
        staleness = self._staleness(versions, position).values()
        within = (age for age in staleness if age <= self._max_staleness)
        return max(within, default=max(staleness, default=0))

    def _staleness(
        self, versions: tuple[PolicyVersion, ...], position: Position
    ) -> dict[PolicyVersion, int]:
        return {version: self._lineage.staleness(version, position) for version in versions}

    def _is_past(self, staleness: dict[PolicyVersion, int]) -> bool:
        return max(staleness.values(), default=0) > self._max_staleness

    def _judge(self, entry: Entry, staleness: dict[PolicyVersion, int]) -> None:
        verdict = self._verdicts.at_get(entry, staleness)
        if verdict == KEEP:
            return
        oldest = max(staleness.values(), default=0)
        if (verdict.action, verdict.reason) != ("mask", entry.masked):
            self._log.info(
                "group_stale", group=entry.group_id, staleness=oldest, verdict=verdict.action
            )
        if verdict.action != "mask":
            self._table.window.rejected_staleness.count(oldest)
        self._apply(entry, verdict)

    def _apply(self, entry: Entry, verdict: Verdict) -> None:
        match verdict.action:
            case "keep":
                pass
            case "drop":
                self._table.drop(entry, verdict.reason)
            case "retry":
                self._table.retry(entry, verdict.reason)
            case "mask":
                self._table.mask(entry, verdict.reason)
