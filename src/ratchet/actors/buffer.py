"""BufferActor: the single writer of the life of every prompt group, from issue to training.

Consumes the task's prompts, `ClaimPrompts` credits and finished groups of rollouts, `RequestBatch`
and `StepTrained` of the trainer, and versions from the registry. Produces `PromptsClaimed` and
`BatchReady`. Three loops share its state, and none of them ever waits inside a handler:

* issue: a prompt goes out when a worker has credit and there is room. Room is capacity minus the
  groups in flight and finished, so whoever finishes always finds a place. What unblocks it: a batch
  taken, a group dropped, a credit.
* finish: a group is judged when it arrives (`verdicts`) and queued, first in, first out. A group
  with a token of a version that is not known here waits for the registry's word on it first.
* batch: the trainer's request waits until `batch_groups` groups are queued that are fresh for the
  weights that will take the step. What unblocks it: a finish. What ends a wait that nobody would
  end otherwise: the lease of each group in flight, after which its prompt is issued again.

The synchronous baseline is the same loop with one batch of room, freed only by the new version.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, assert_never

from ratchet.actors.credits import Credits
from ratchet.actors.filters import mask_aborted
from ratchet.actors.group_table import Entry, GroupTable
from ratchet.actors.known_versions import KnownVersions
from ratchet.actors.prompt_source import PromptSource
from ratchet.actors.role import RoleActor
from ratchet.actors.system import System
from ratchet.actors.verdicts import KEEP, Verdict, Verdicts
from ratchet.config import Config
from ratchet.errors import AskTimeout
from ratchet.messages import (
    BatchReady,
    BufferMessage,
    ClaimPrompts,
    DescribeLineage,
    Down,
    GroupFailed,
    GroupFinished,
    LineageDescribed,
    Message,
    PromptsClaimed,
    RequestBatch,
    RoleJoined,
    RoleLeft,
    RoleRegistered,
    RunEnded,
    StepTrained,
    VersionUpdated,
)
from ratchet.staleness import Position
from ratchet.status import Fact
from ratchet.storage.ledger import GroupLedger
from ratchet.types import (
    Assignment,
    Batch,
    BufferStats,
    PolicyVersion,
    Prompt,
    RoleInfo,
    RolloutStats,
    Term,
    VersionRecord,
)

_FLUSH_S: Final = 0.2


class CheckLeases(Message, frozen=True):
    """To itself: the oldest lease may have ended."""


class FlushLedger(Message, frozen=True):
    """To itself: make the ledger's last transitions durable."""


class LineageLearned(Message, frozen=True):
    """To itself: the registry has answered; the finishes that waited for it can be judged."""

    asked: tuple[PolicyVersion, ...]
    versions: tuple[VersionRecord, ...]


_Inbox = BufferMessage | Down | RoleRegistered | CheckLeases | FlushLedger | LineageLearned


class BufferActor(RoleActor[_Inbox]):
    """Admission, leases, staleness verdicts and batches."""

    def __init__(
        self,
        system: System,
        role: RoleInfo,
        *,
        config: Config,
        prompts: Sequence[Prompt],
        ledger: GroupLedger,
    ) -> None:
        super().__init__(system, role)
        self._config = config.buffer
        self._group_size = config.rollout.group_size
        self._synchronous = config.trainer.synchronous
        self._capacity = config.buffer.batch_groups if self._synchronous else config.buffer.capacity
        self._table = GroupTable(
            ledger,
            PromptSource(prompts, config.seed, config.task.weights),
            wall_time=system.wall_time,
            max_reissues=config.buffer.max_reissues,
        )
        self._verdicts = Verdicts(config.buffer)
        self._credits = Credits()
        self._known = KnownVersions()
        self._term: Term = 0
        self._request: RequestBatch | None = None
        self._handed: tuple[RequestBatch, BatchReady] | None = None
        self._untrained: dict[int, int] = {}  # synchronous: group -> step whose version frees it
        self._workers: dict[str, RolloutStats] = {}
        self._totals: Counter[str] = Counter()  # of the windows that were taken
        self._lease_timer = False
        self._flush_timer = False

    def on_stop(self) -> None:
        """Make the ledger durable."""
        self._table.close()

    def status(self) -> Mapping[str, Fact]:
        """Where the groups are, whether the trainer waits, and what was dropped so far."""
        request, window, totals = self._request, self._table.window, self._totals
        return {
            "queue_groups": self._table.num_queued,
            "in_flight_groups": self._table.num_in_flight,
            "untrained_groups": len(self._untrained),
            "capacity": self._capacity,
            "batch_groups": self._config.batch_groups,
            "request_step": None if request is None else request.step + 1,
            "credit_groups": self._credits.num_free,
            "dropped_groups": totals["dropped"] + window.dropped.total(),
            "retried_groups": totals["retried"] + window.retried.total(),
            "reissued_groups": totals["reissued"] + window.reissued.total(),
        }

    def receive(self, message: _Inbox) -> None:
        """Handle one message, then hand out whatever it made possible."""
        match message:
            case ClaimPrompts():
                self._credits.grant(message.worker, message.incarnation, message.credit)
            case GroupFinished():
                self._finish(message)
            case GroupFailed():
                self._fail(message)
            case RequestBatch():
                self._take_request(message)
            case StepTrained():
                self._trained(message)
            case VersionUpdated():
                self._version_updated(message.record)
            case Down():
                self.registry_lost(message)
            case RoleRegistered():
                self._known.learn(message.versions)
            case LineageLearned():
                self._finish_all(self._known.answered(message.asked, message.versions))
            case RoleLeft():
                self._role_left(message.role)
            case RoleJoined():
                self.learn(message.role)
            case RunEnded():
                self.run_ended(message)
            case CheckLeases():
                self._end_leases()
            case FlushLedger():
                self._flush_timer = False
                self._table.flush()
            case _:
                assert_never(message)
        self._hand_out()

    def _hand_out(self) -> None:
        self._serve()
        self._issue()
        if self._table.dirty and not self._flush_timer:
            self._flush_timer = True
            self.after(_FLUSH_S, FlushLedger())

    # --- issue

    def _issue(self) -> None:
        claimed: dict[tuple[str, str], list[Assignment]] = {}
        now = self.now()
        room = self._capacity - self._table.num_open - len(self._untrained)
        while room > 0 and (worker := self._credits.take()) is not None:
            entry = self._table.claim(worker, until=now + self._config.lease_s)
            claimed.setdefault(worker, []).append(
                Assignment(
                    entry.group_id,
                    entry.attempt,
                    entry.epoch,
                    entry.prompt,
                    self._group_size,
                    self._config.lease_s,
                )
            )
            room -= 1
        if claimed:
            self._table.flush()  # what others are told is on disk first
        for (name, incarnation), assignments in claimed.items():
            self.system.ref(name).tell(PromptsClaimed(incarnation, tuple(assignments)))
        self._arm_leases()

    def _arm_leases(self) -> None:
        if self._lease_timer:
            return
        end = self._table.next_lease_end()
        if end is not None:
            self.after(max(0.0, end - self.now()), CheckLeases())
            self._lease_timer = True

    def _end_leases(self) -> None:
        self._lease_timer = False
        for entry in self._table.overdue(self.now()):
            self.log.warning(
                "lease_expired",
                group=entry.group_id,
                attempt=entry.attempt,
                worker=entry.worker,
                lease_s=self._config.lease_s,
            )
            self._credits.lapse(entry.worker, entry.incarnation)
            self._table.reissue(entry, "lease_expired")

    def _role_left(self, role: RoleInfo) -> None:
        self._credits.close(role.name, role.incarnation)
        stats = self._workers.get(role.name)
        if stats is not None and stats.incarnation == role.incarnation:
            del self._workers[role.name]
        for entry in self._table.held_by(role.name, role.incarnation):
            self.log.warning("lease_ended", group=entry.group_id, worker=role.name)
            self._table.reissue(entry, "worker_died")

    # --- finish

    def _claimed(self, worker: str, incarnation: str, group_id: int, attempt: int) -> Entry | None:
        entry = self._table.claimed(worker, incarnation, group_id, attempt)
        if entry is None:
            self.log.warning("late_finish", group=group_id, attempt=attempt, worker=worker)
            self._credits.late(worker, incarnation)
        return entry

    def _finish(self, message: GroupFinished) -> None:
        group = message.group
        self._workers[message.worker] = message.stats
        entry = self._claimed(message.worker, message.incarnation, group.group_id, group.attempt)
        if entry is None:
            return
        versions = group.versions
        unknown = self._known.lineage.unknown(versions)
        if unknown:
            self._known.park(message)
            self._ask_for(unknown)
            return
        self._table.finish(entry, group, versions)
        self._apply(entry, self._verdicts.at_finish(entry))
        if entry.masked:
            entry.group = mask_aborted(group)

    def _finish_all(self, finishes: Sequence[GroupFinished]) -> None:
        for finish in finishes:
            self._finish(finish)

    def _fail(self, message: GroupFailed) -> None:
        self._workers[message.worker] = message.stats
        entry = self._claimed(
            message.worker, message.incarnation, message.group_id, message.attempt
        )
        if entry is not None:
            self.log.warning(
                "group_failed",
                group=message.group_id,
                attempt=message.attempt,
                worker=message.worker,
                reason=message.reason,
                detail=message.detail,
            )
            verdict = self._verdicts.at_failure(entry, message.reason, message.detail)
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

    # --- versions

    def _version_updated(self, record: VersionRecord) -> None:
        self._known.learn((record,))
        self._untrained = {
            group: step for group, step in self._untrained.items() if step > record.step
        }
        if not self._known.lineage.unknown((record.version,)):
            self._purge(Position(record.version, record.step))

    def _ask_for(self, versions: Sequence[PolicyVersion]) -> None:
        versions = self._known.to_ask(versions)
        if versions:
            self.spawn(self._describe(versions), name="describe-lineage")

    async def _describe(self, versions: tuple[PolicyVersion, ...]) -> None:
        while True:
            try:
                reply: LineageDescribed = await self.ask(self.registry, DescribeLineage(versions))
            except AskTimeout as error:  # the leases go on counting; what waits is named in the log
                self.log.warning("lineage_unanswered", versions=versions, detail=str(error))
                continue
            self.actor_ref.tell(LineageLearned(versions, reply.versions))
            return

    def _purge(self, position: Position) -> None:
        for entry in self._table.queued():
            self._judge(entry, position)

    def _judge(self, entry: Entry, position: Position) -> None:
        staleness = {v: self._known.lineage.staleness(v, position) for v in entry.versions}
        verdict = self._verdicts.at_get(entry, staleness)
        oldest = max(staleness.values(), default=0)
        within = (s for s in staleness.values() if s <= self._config.max_staleness)
        entry.staleness = max(within, default=oldest)
        if verdict != KEEP and (verdict.action, verdict.reason) != ("mask", entry.masked):
            action = verdict.action
            self.log.info("group_stale", group=entry.group_id, staleness=oldest, verdict=action)
        self._apply(entry, verdict)

    # --- batch

    def _take_request(self, message: RequestBatch) -> None:
        if message.term < self._term:
            self.log.warning("request_fenced", term=message.term, newer=self._term)
            return
        if message.term > self._term:
            self._term = message.term
            self._untrained.clear()  # the versions that would free this room will never come
        if message.done is not None and self._is_handed(message.done):
            self._trained(message.done)  # its own message was lost on its way
        if self._handed is not None:
            request, ready = self._handed
            if (message.term, message.step) == (request.term, request.step):
                self.system.ref(message.trainer).tell(ready)  # the first one was lost on its way
                return
            # another trainer, or one that lost its memory: what it was handed was never trained
            for entry in self._table.batched():
                self._untrained.pop(entry.group_id, None)
                self._table.reissue(entry, "trainer_died")
            self._handed = None
        unknown = self._known.lineage.unknown((message.version,))
        self._request = message
        if unknown:
            self._ask_for(unknown)
        else:
            self._purge(Position(message.version, message.step))

    def _serve(self) -> None:
        request = self._request
        if request is None:
            return
        if unknown := self._known.lineage.unknown((request.version,)):
            self._ask_for(unknown)  # one ancestor after the other: burnt ones are not announced
            return
        if self._table.num_queued < self._config.batch_groups:
            return
        self._purge(Position(request.version, request.step))
        queued = self._table.queued()[: self._config.batch_groups]
        if len(queued) < self._config.batch_groups:
            return
        step = request.step + 1
        groups = self._table.batch(queued, step)
        stats = self._stats(tuple(entry.staleness for entry in queued))
        ready = BatchReady(request.term, Batch(step, groups), stats)
        self._request, self._handed = None, (request, ready)
        self._table.flush()
        if self._synchronous:
            self._untrained.update((entry.group_id, step) for entry in queued)
        self.system.ref(request.trainer).tell(ready)

    def _is_handed(self, done: StepTrained) -> bool:
        """Whether this is the account of the batch that is out."""
        accounted = {*done.trained, *done.rejected}
        return (
            self._handed is not None
            and self._handed[0].term == done.term
            and accounted == {entry.group_id for entry in self._table.batched()}
        )

    def _trained(self, message: StepTrained) -> None:
        if self._handed is None or not self._is_handed(message):
            self.log.warning("step_fenced", term=message.term, step=message.step)
            return
        request, _ = self._handed
        self._handed = None
        self._table.train(message.trained, message.step, request.version)
        for group_id, reason in message.rejected.items():
            self._untrained.pop(group_id, None)
            entry = self._table.rejected(group_id)
            self._apply(entry, self._verdicts.at_step(entry, reason))

    def _stats(self, staleness: tuple[int, ...]) -> BufferStats:
        window = self._table.take_window()
        self._totals["dropped"] += window.dropped.total()
        self._totals["retried"] += window.retried.total()
        self._totals["reissued"] += window.reissued.total()
        return BufferStats(
            queue_groups=self._table.num_queued,
            in_flight_groups=self._table.num_in_flight,
            staleness=staleness,
            dropped=dict(window.dropped),
            retried=window.retried.total(),
            masked=dict(window.masked),
            leases_expired=window.reissued.total(),
            workers=tuple(self._workers.values()),
            finished_groups=len(window.finished_rewards),
            finished_reward_mean=statistics.fmean(window.finished_rewards)
            if window.finished_rewards
            else None,
        )
