"""Every open group of the buffer, and the ledger that remembers all of them.

Consumes the buffer's verdicts, produces entries and writes each transition to the ledger; waits for
nothing. A group is in exactly one place: waiting (issued, to be claimed again), in flight (claimed,
under a lease), queued (finished, first in, first out), batched (handed to the trainer), or gone
(trained, dropped). Nothing else may move a group, so that what is counted is what is there.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ratchet.actors.admission import OpenGroups
from ratchet.actors.finished_queue import FinishedQueue
from ratchet.actors.prompt_source import PromptSource
from ratchet.actors.stored_groups import StoredGroups
from ratchet.actors.window import Made, Window
from ratchet.storage.ledger import GroupLedger, GroupRow
from ratchet.types import PolicyVersion, Prompt, RolloutGroup


class Entry(msgspec.Struct, eq=False, gc=False):
    """One group that is not gone yet. It is in no cycle, and there are tens of thousands: the
    garbage collector need not walk through them.
    """

    group_id: int
    epoch: int
    prompt: Prompt
    attempt: int = 0
    retries: int = 0
    reissues: int = 0
    worker: str = ""
    incarnation: str = ""
    base: PolicyVersion = 0
    """in flight: no token of it is older"""
    claimed_at: float = 0.0
    lease_end: float = 0.0
    group: RolloutGroup | None = None
    versions: tuple[PolicyVersion, ...] = ()
    num_bytes: int = 0
    """of the group's arrays, as they came in"""
    staleness: int = 0
    """of the oldest token that is trained, when it was last judged"""
    masked: str = ""
    """why a part of it is not trained"""
    made: Made | None = None
    """queued or batched: for the counters; None if it was batched in an earlier life"""


class GroupTable:
    """The places of all open groups."""

    def __init__(
        self,
        ledger: GroupLedger,
        source: PromptSource,
        *,
        wall_time: Callable[[], float],
        now: Callable[[], float],
        max_reissues: int,
        by_task: bool = False,
        stored: StoredGroups | None = None,
    ) -> None:
        self._ledger = ledger
        self._source = source
        self._wall = wall_time
        self._now = now
        self._max_reissues = max_reissues
        self._waiting: deque[Entry] = deque()
        self._in_flight: dict[int, Entry] = {}  # in the order of their leases' ends
        self._held: dict[tuple[str, str], dict[int, Entry]] = {}  # those in flight, by worker
        self._bases: Counter[PolicyVersion] = Counter()  # those in flight, by what they begin with
        self.queue = FinishedQueue()
        self._batched: dict[int, Entry] = {}
        self.stored = StoredGroups() if stored is None else stored
        self._window = Window(by_task)
        self.dirty = False
        """There are transitions that a flush would make durable."""
        self.goes_on = False
        """An earlier life has issued prompts."""
        self._restore()

    def _restore(self) -> None:
        """Go on from the ledger of an earlier life. What was in flight is issued again, and what
        was finished comes back from its payload, if there is one; what was batched stays so until
        a trainer says what became of it.

        Raises:
            TaskError: if the task does not have a prompt of the ledger.
        """
        cursor = self._cursor = tuple(self._ledger.load_cursor())
        self.goes_on = cursor > (0, 0)
        self._source.seek(*cursor)
        rows = self._ledger.groups("issued", "claimed", "finished", "batched")
        prompts = self._source.find({row.prompt_id for row in rows}) if rows else {}
        self._restore_stored()
        for row in rows:
            entry = self._entry(row, prompts)
            if row.state == "batched":
                self._batched[row.group_id] = entry
            elif row.state == "issued":
                self._line_up(entry, row.reason or "")
            else:
                self._window.reissued["buffer_died"] += 1
                self._give_up(entry, "buffer_died", counts=False)
                self._line_up(entry, "buffer_died")

    def _restore_stored(self) -> None:
        self.stored.saved_step = self._ledger.committed_step()
        rows = {group_id: self._ledger.group(group_id) for group_id in self.stored.ids}
        past = ("claimed", "committed", "dropped")
        self.stored.forget([i for i, row in rows.items() if row is None or row.state in past])

    @staticmethod
    def _entry(row: GroupRow, prompts: Mapping[str, Prompt]) -> Entry:
        prompt = prompts[row.prompt_id]
        return Entry(
            row.group_id,
            row.epoch,
            prompt,
            attempt=row.attempt,
            retries=row.retries,
            staleness=row.staleness or 0,
        )

    @property
    def num_in_flight(self) -> int:
        """Groups under a lease."""
        return len(self._in_flight)

    @property
    def num_queued(self) -> int:
        """Finished groups."""
        return len(self.queue)

    @property
    def num_open(self) -> int:
        """Groups that count against the capacity: in flight and finished. Those that are stored are
        not in memory; they have the next place.
        """
        return len(self._in_flight) + len(self.queue)

    @property
    def open_groups(self) -> OpenGroups:
        """What holds room."""
        queue = self.queue
        return OpenGroups(len(self._in_flight), len(queue), queue.num_bytes, queue.largest_bytes)

    @property
    def promised(self) -> OpenGroups:
        """What holds room, and what comes before any new prompt."""
        groups = self.open_groups
        if not self.stored:
            return groups
        return groups._replace(num_in_flight=groups.num_in_flight + len(self.stored))

    @property
    def bases(self) -> Mapping[PolicyVersion, int]:
        """The versions that groups in flight may begin with, and how many groups each."""
        return self._bases

    @property
    def window(self) -> Window:
        """The counters since they were last taken."""
        return self._window

    # --- issue and claim

    def claim(self, worker: tuple[str, str], until: float, base: PolicyVersion = 0) -> Entry:
        """Put the next group, one that waits before a new one, under a lease of (name,
        incarnation), which holds no version older than `base`.
        """
        if self._waiting:
            entry = self._waiting.popleft()
            self.stored.forget([entry.group_id])
        else:
            epoch, prompt = self._source.next()
            entry = Entry(self._ledger.issue(prompt.prompt_id, epoch, self._wall()), epoch, prompt)
        entry.worker, entry.incarnation = worker
        entry.claimed_at = self._now()
        entry.lease_end = until
        entry.base = base
        self._bases[base] += 1
        self._in_flight[entry.group_id] = entry
        self._held.setdefault(worker, {})[entry.group_id] = entry
        self.dirty = True
        self._ledger.claim(entry.group_id, entry.attempt, entry.worker, self._wall())
        return entry

    def claimed(self, worker: str, incarnation: str, group_id: int, attempt: int) -> Entry | None:
        """Return the group if exactly this try of it is in flight at exactly this worker."""
        entry = self._in_flight.get(group_id)
        if entry is None:
            return None
        held = (entry.worker, entry.incarnation, entry.attempt)
        return entry if held == (worker, incarnation, attempt) else None

    def held_by(self, worker: str, incarnation: str) -> list[Entry]:
        """Return what a worker has in flight."""
        return list(self._held.get((worker, incarnation), {}).values())

    def overdue(self, now: float) -> list[Entry]:
        """Return the groups whose lease has ended."""
        oldest_first = self._in_flight.values()
        return list(itertools.takewhile(lambda entry: entry.lease_end <= now, oldest_first))

    def next_lease_end(self) -> float | None:
        """Return when the oldest lease ends."""
        return next((entry.lease_end for entry in self._in_flight.values()), None)

    # --- finish

    def finish(
        self, entry: Entry, group: RolloutGroup, versions: tuple[PolicyVersion, ...]
    ) -> None:
        """Queue a claimed group."""
        self._land(entry)
        made = self._queue(entry, group, versions, requeued=False)
        self._window.finished(entry.prompt.prompt_id, made, entry.claimed_at)

    def requeue(
        self, entry: Entry, group: RolloutGroup, versions: tuple[PolicyVersion, ...]
    ) -> None:
        """Queue a group that was stored; its first finish has counted."""
        self._queue(entry, group, versions, requeued=True)
        self._window.num_requeued += 1

    def next_stored(self) -> tuple[Entry, RolloutGroup] | None:
        """Return what was stored for longest, to be queued; what cannot be read is issued again."""
        while self.stored:
            entry, group = self.stored.next()
            if group is not None:
                return entry, group
            self._waiting.append(entry)
        return None

    def reissue_stored(self, entry: Entry) -> None:
        """Its result cannot be judged: let a worker have it."""
        self._waiting.append(entry)

    def _queue(
        self,
        entry: Entry,
        group: RolloutGroup,
        versions: tuple[PolicyVersion, ...],
        *,
        requeued: bool,
    ) -> Made:
        entry.group, entry.versions = group, versions
        entry.made = made = Made.of(group, self._now())
        self.queue.put(entry, group)
        reward_mean, reward_std = _mean_and_deviation(made.rewards)
        self.dirty = True
        self._ledger.finish(
            entry.group_id,
            entry.attempt,
            min_version=min(versions, default=None),
            max_version=max(versions, default=None),
            reward_mean=reward_mean,
            reward_std=reward_std,
            num_tokens=group.num_tokens,
            num_rollouts=len(group.rollouts),
            now=self._wall(),
            requeued=requeued,
        )
        return made

    def mask(self, entry: Entry, reason: str) -> None:
        """Note that only a part of a queued group is worth training, once per reason."""
        if entry.masked == reason:
            return
        entry.masked = reason
        self.dirty = True
        self._ledger.mask(entry.group_id, reason, self._wall())

    def queued(self) -> list[Entry]:
        """Return the finished groups, oldest finish first."""
        return list(self.queue)

    # --- out: batch, train, drop, again

    def batch(self, entries: Sequence[Entry], step: int) -> tuple[RolloutGroup, ...]:
        """Hand queued groups to the trainer."""
        for entry in entries:
            self._batched[entry.group_id] = self.queue.take(entry.group_id)
            if entry.masked:
                self._window.masked[entry.masked] += 1
        self.dirty = True
        self._ledger.batch(
            [entry.group_id for entry in entries],
            step,
            {entry.group_id: entry.staleness for entry in entries},
            self._wall(),
        )
        return tuple(entry.group for entry in entries if entry.group is not None)

    def batched(self) -> list[Entry]:
        """Return what the trainer was handed and has not accounted for."""
        return list(self._batched.values())

    def train(self, group_ids: Sequence[int], step: int, version: PolicyVersion) -> None:
        """Forget groups that an optimiser step has used."""
        now = self._now()
        for group_id in group_ids:
            entry = self._batched.pop(group_id)
            self._window.has_trained(entry.prompt.prompt_id, entry.made, now)
        self.dirty = True
        self._ledger.train(group_ids, step, version, self._wall())
        self.stored.trained(group_ids, step)

    def commit(self, step: int) -> None:
        """A checkpoint has all that was trained up to a step: forget the payloads."""
        self.stored.committed(self._ledger.commit(step, self._wall()), step)
        self.dirty = True

    def trained_steps(self) -> tuple[tuple[PolicyVersion, int], ...]:
        """Return (version that the step started from, step) of all that trained a group."""
        return self._ledger.trained_steps()

    def lose(self, version: PolicyVersion, step: int) -> int:
        """Issue the groups again that a step trained whose result is lost; return how many. Those
        whose payload is there come back from it.
        """
        rows = self._ledger.lose(version, step, "step_lost", self._wall())
        prompts = self._source.find({row.prompt_id for row in rows})
        for row in rows:
            self._line_up(self._entry(row, prompts), "step_lost")
        self._window.reissued["step_lost"] += len(rows)
        self.dirty = True
        return len(rows)

    def rejected(self, group_id: int) -> Entry:
        """Return one group of the batch that its step did not use."""
        return self._batched[group_id]

    def retry(self, entry: Entry, reason: str) -> None:
        """Issue it again, as the unused handler says: that has a budget of its own."""
        entry.retries += 1
        self._window.retried[reason] += 1
        self._again(entry, reason, counts=True)

    def reissue(self, entry: Entry, reason: str) -> None:
        """Its worker died or stalled: issue it again, unless it did that too often."""
        if entry.reissues < self._max_reissues:
            entry.reissues += 1
            self._window.reissued[reason] += 1
            self._again(entry, reason)
        else:
            self.drop(entry, reason)

    def drop(self, entry: Entry, reason: str) -> None:
        """Forget a group, and remember why."""
        self._take_out(entry)
        self.stored.forget([entry.group_id])
        self._window.dropped[reason] += 1
        self.dirty = True
        self._ledger.drop(entry.group_id, reason, self._wall())

    def take_window(self) -> Window:
        """Return the counters since the last call, and reset them."""
        window, self._window = self._window, self._window.next()
        return window

    def flush(self) -> None:
        """Make the ledger durable up to here."""
        cursor = self._source.epoch, self._source.position
        if cursor != self._cursor:
            self._ledger.save_cursor(*cursor)
            self._cursor = cursor
        self._ledger.flush()
        self.dirty = False

    def close(self) -> None:
        """Flush, and close the ledger."""
        self.flush()
        self._ledger.close()
        self.stored.close()

    def _again(self, entry: Entry, reason: str, *, counts: bool = False) -> None:
        self._take_out(entry)
        self._give_up(entry, reason, counts=counts)
        entry.group, entry.versions, entry.masked = None, (), ""
        self._line_up(entry, reason)

    def _line_up(self, entry: Entry, reason: str) -> None:
        if not self.stored.recall(entry, reason):
            self._waiting.append(entry)

    def _give_up(self, entry: Entry, reason: str, *, counts: bool) -> None:
        self.dirty = True
        self._ledger.retry(entry.group_id, entry.attempt, reason, self._wall(), counts=counts)
        entry.attempt += 1

    def _take_out(self, entry: Entry) -> None:
        if entry.group_id in self._in_flight:
            self._land(entry)
            return
        if entry in self.queue:
            self.queue.take(entry.group_id)
        elif self._batched.pop(entry.group_id, None) is None:
            msg = f"group {entry.group_id} is in no place that it could leave"
            raise RuntimeError(msg)
        self._window.has_lost(entry.prompt.prompt_id, entry.made)
        entry.made = None

    def _land(self, entry: Entry) -> None:
        """Out of flight; where it comes to is the caller's."""
        del self._in_flight[entry.group_id]
        self._bases[entry.base] -= 1
        if not self._bases[entry.base]:
            del self._bases[entry.base]
        worker = entry.worker, entry.incarnation
        held = self._held[worker]
        del held[entry.group_id]
        if not held:
            del self._held[worker]


def _mean_and_deviation(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean and the population standard deviation; `statistics` computes in fractions,
    which takes longer than all else that is done with a group here.
    """
    if not values:
        return None, None
    mean = sum(values) / len(values)
    return mean, math.dist(values, (mean,) * len(values)) / math.sqrt(len(values))
