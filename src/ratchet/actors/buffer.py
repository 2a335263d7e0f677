"""BufferActor: the single writer of the life of every prompt group, from issue to training.

Consumes the task's prompts, `ClaimPrompts` credits and finished groups of rollouts, `RequestBatch`
and `StepTrained` of the trainer, and versions from the registry. Produces `PromptsClaimed` and
`BatchReady`. Three loops share its state, and none of them ever waits inside a handler:

* issue: a prompt goes out when a worker has credit and there is room (`issuing`, `admission`),
  counted with the groups in flight, so whoever finishes always finds a place. What unblocks it: a
  batch taken, a group dropped, a credit; with a bounded admission a claim from newer weights.
* finish: a group is judged when it arrives, and again when the weights change (`judging`). One
  with a token of a version that is not known here waits for the registry's word on it first.
* batch: the trainer's request waits until `batch_groups` groups are queued that are fresh for the
  weights that will take the step, and the policy chooses among them (first in, first out, or see
  `buffer_policy`; with a bounded admission `due_first`). What unblocks it: a finish. What ends a
  wait that nobody would end otherwise: the lease of each group in flight, after which its prompt is
  issued again.

The synchronous baseline is the same loop under a bounded admission with the bound 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, assert_never

from ratchet.actors.batches import Batches
from ratchet.actors.buffer_parts import BufferParts
from ratchet.actors.buffer_policy import Policy
from ratchet.actors.buffer_stats import BufferCounts
from ratchet.actors.filters import unwatched
from ratchet.actors.finishing import Finishing
from ratchet.actors.group_table import GroupTable
from ratchet.actors.issuing import Issuing
from ratchet.actors.judging import Judging
from ratchet.actors.known_versions import KnownVersions
from ratchet.actors.prompt_source import PromptSource
from ratchet.actors.role import RoleActor
from ratchet.actors.stored_groups import StoredGroups
from ratchet.actors.system import System
from ratchet.config import Config
from ratchet.messages import (
    BatchReady,
    BufferMessage,
    CheckpointWritten,
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
from ratchet.observability.own_calls import OwnCalls
from ratchet.staleness import Position
from ratchet.status import Fact
from ratchet.storage.ledger import GroupLedger
from ratchet.storage.payloads import Payloads
from ratchet.types import Assignment, PolicyVersion, Prompt, RoleInfo, VersionRecord

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
        payloads: Payloads | None = None,
        own_calls: OwnCalls | None = None,
    ) -> None:
        super().__init__(system, role)
        self._own_calls = own_calls
        watch = unwatched if own_calls is None else own_calls.watch
        self._config = config.buffer
        self._capacity = config.most_open_groups
        self._table = GroupTable(
            ledger,
            PromptSource(prompts, config.seed, config.task.weights),
            wall_time=system.wall_time,
            now=self.now,
            max_reissues=config.buffer.max_reissues,
            by_task=len(config.task.weights) > 1,
            stored=StoredGroups(payloads, config.buffer.max_staleness, self.log),
        )
        self._known = KnownVersions()
        self._issuing = Issuing(config, self._table, self._known.lineage)
        self._judging = Judging(config.buffer, self._table, self._known.lineage, self.log, watch)
        self._policy = Policy.load(config.buffer, watch)
        self._counts = BufferCounts(self._table)
        parts = BufferParts(
            table=self._table,
            known=self._known,
            judging=self._judging,
            issuing=self._issuing,
            counts=self._counts,
            policy=self._policy,
            log=self.log,
        )
        self._finishing = Finishing(config.buffer, parts)
        self._batches = Batches(config.buffer, parts)
        self._lease_timer = False
        self._flush_timer = False
        self._early: list[RequestBatch] | None = []
        """of trainers that asked before the registry has said which terms there are"""

    def on_stop(self) -> None:
        """Make the ledger durable."""
        self._table.close()

    def release(self) -> None:
        """Let go of the ledger. A message that failed may have made half of its transitions, so
        those of its turn are undone. End the watch over code of the user's own.
        """
        self._table.abandon()
        if self._own_calls is not None:
            self._own_calls.close()

    def status(self) -> Mapping[str, Fact]:
        """Where the groups are, whether the trainer waits, and what was dropped so far."""
        request = self._batches.request
        return {
            "queue_groups": self._table.num_queued,
            "in_flight_groups": len(self._table.in_flight),
            "withheld_groups": self._issuing.withheld,
            "capacity": self._capacity,
            "batch_groups": self._config.batch_groups,
            "request_step": None if request is None else request.step + 1,
            "credit_groups": self._issuing.credits.num_free,
            **self._counts.totals(),
        }

    def receive(self, message: _Inbox) -> None:
        """Handle one message. What it makes possible is handed out at the end of the turn."""
        match message:
            case ClaimPrompts():
                self._claim(message)
            case GroupFinished():
                self._ask_for(self._finishing.finish(message))
            case GroupFailed():
                self._finishing.fail(message)
            case RequestBatch():
                self._take_request(message)
            case StepTrained():
                self._batches.trained(message)
            case CheckpointWritten():
                self._batches.committed(message)
            case VersionUpdated():
                self._version_updated(message.record)
            case Down():
                self.down(message)
                self._stranger_left(message.name)
            case RoleRegistered():
                self._registered(message)
            case LineageLearned():
                for finish in self._known.answered(message.asked, message.versions):
                    self._ask_for(self._finishing.finish(finish))
            case RoleLeft():
                self._role_left(message.role)
            case RoleJoined():
                self.learn(message.role)
                self._issuing.credits.reopen(message.role.name, message.role.incarnation)
            case RunEnded():
                self.run_ended(message)
            case CheckLeases():
                self._lease_timer = False
                self._finishing.end_leases(self.now())
            case FlushLedger():
                self._flush_timer = False
                self._table.flush()
            case _:
                assert_never(message)

    def end_turn(self) -> None:
        """Hand out whatever the messages of the turn made possible, in one transaction."""
        told = [*self._serve(), *self._issue()]
        if told:
            self._table.flush()  # what others are told is on disk first, in one transaction
        for name, message in told:
            self.system.ref(name).tell(message)
        if self._table.dirty and not self._flush_timer:
            self._flush_timer = True
            self.after(_FLUSH_S, FlushLedger())

    # --- issue

    def _claim(self, message: ClaimPrompts) -> None:
        if message.buffer != self.role.incarnation:
            return  # it counts another life's
        is_first = self._issuing.claim(message)
        if is_first and self.life_of(message.worker) != message.incarnation:
            # a registry that dies before it has told of this worker will not tell of its end
            self.system.ref(message.worker).watch(self.actor_ref)

    def _stranger_left(self, name: str) -> None:
        incarnation = self._issuing.credits.life_of(name)
        if incarnation and self.life_of(name) != incarnation:
            self._role_left(RoleInfo("rollout", name, incarnation))

    def _issue(self) -> list[tuple[str, PromptsClaimed]]:
        self._ask_for(self._issuing.unknown)
        claimed: dict[tuple[str, str], list[Assignment]] = {}
        for worker, assignment in self._issuing.issue(self.now()):
            claimed.setdefault(worker, []).append(assignment)
        self._arm_leases()
        return [
            (name, PromptsClaimed(incarnation, tuple(assignments), self.role.incarnation))
            for (name, incarnation), assignments in claimed.items()
        ]

    def _arm_leases(self) -> None:
        if self._lease_timer:
            return
        end = self._table.in_flight.next_end()
        if end is not None:
            self.after(max(0.0, end - self.now()), CheckLeases())
            self._lease_timer = True

    def _role_left(self, role: RoleInfo) -> None:
        self.left(role)
        self._issuing.credits.close(role.name, role.incarnation)
        self._counts.left(role)
        self._finishing.left(role)

    # --- versions

    def _version_updated(self, record: VersionRecord) -> None:
        self._known.learn((record,))
        self._batches.heard_of((record,))
        self._issuing.published(record)
        if not self._known.lineage.unknown((record.version,)):
            self._judging.published(Position(record.version, record.step))

    def _ask_for(self, versions: Sequence[PolicyVersion]) -> None:
        if versions and (new := self._known.to_ask(versions)):
            self.spawn(self._describe(new), name="describe-lineage")

    async def _describe(self, versions: tuple[PolicyVersion, ...]) -> None:
        reply: LineageDescribed = await self.ask(self.registry, DescribeLineage(versions))
        self.actor_ref.tell(LineageLearned(versions, reply.versions))

    # --- batch

    def _registered(self, message: RoleRegistered) -> None:
        self._known.learn(message.versions)
        self._batches.heard_of(message.versions)
        for record in message.versions:
            self._issuing.published(record)
        early, self._early = self._early or [], None
        for request in early:
            self._take_request(request)

    def _take_request(self, message: RequestBatch) -> None:
        if message.buffer != self.role.incarnation:
            return  # its trainer would still take the batch of another life
        if self._early is not None:
            self._early.append(message)
            return
        ready = self._batches.take(message)
        if ready is not None:
            self.system.ref(message.trainer).tell(ready)

    def _serve(self) -> list[tuple[str, BatchReady]]:
        self._ask_for(self._batches.unknown)
        served = self._batches.serve()
        if served is None:
            return []
        request, ready = served
        return [(request.trainer, ready)]
