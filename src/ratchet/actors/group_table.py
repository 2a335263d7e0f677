"""Every open group of the buffer, and the ledger that remembers all of them.

Consumes the buffer's verdicts, produces entries and writes each transition to the ledger; waits for
nothing. A group is in exactly one place: waiting (issued, to be claimed again), in flight (claimed,
under a lease), queued (finished, first in, first out), batched (handed to the trainer), or gone
(trained, dropped). Nothing else may move a group, so that what is counted is what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ratchet.actors.admission import OpenGroups
from ratchet.actors.entry import Entry
from ratchet.actors.finished_queue import FinishedQueue
from ratchet.actors.in_flight import InFlight
from ratchet.actors.prompt_source import PromptSource
from ratchet.actors.stored_groups import StoredGroups
from ratchet.actors.waiting import Waiting
from ratchet.actors.window import Made, Window
from ratchet.storage.ledger import GroupLedger
from ratchet.types import PolicyVersion, RolloutGroup


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
        self.in_flight = InFlight()
        self.queue = FinishedQueue()
        self._batched: dict[int, Entry] = {}
        self.stored = StoredGroups() if stored is None else stored
        self.waiting = Waiting(self.stored)
        self._window = Window(by_task)
        self.goes_on = self._restore()
        """An earlier life has issued prompts."""

    def _restore(self) -> bool:
        """Go on from the ledger of an earlier life. What was in flight is issued again, and what
        was finished comes back from its payload, if there is one; what was batched stays so until
        a trainer says what became of it.

        Raises:
            TaskError: if the task does not have a prompt of the ledger.
        """
        cursor = self._cursor = tuple(self._ledger.load_cursor())
        self._source.seek(*cursor)
        rows = self._ledger.groups("issued", "claimed", "finished", "batched")
        prompts = self._source.find({row.prompt_id for row in rows}) if rows else {}
        self.stored.restore(self._ledger.committed_step(), self._ledger.group)
        for row in rows:
            entry = Entry.of(row, prompts[row.prompt_id])
            if row.state == "batched":
                self._batched[row.group_id] = entry
            elif row.state == "issued":
                self.waiting.add(entry, row.reason or "")
            else:
                self._window.reissued["buffer_died"] += 1
                self._give_up(entry, "buffer_died", counts=False)
                self.waiting.add(entry, "buffer_died")
        return cursor > (0, 0)

    @property
    def num_queued(self) -> int:
        """Finished groups."""
        return len(self.queue)

    @property
    def num_open(self) -> int:
        """Groups that count against the capacity: in flight and finished. Those that are stored are
        not in memory; they have the next place.
        """
        return len(self.in_flight) + len(self.queue)

    @property
    def open_groups(self) -> OpenGroups:
        """What holds room."""
        queue = self.queue
        return OpenGroups(len(self.in_flight), len(queue), queue.num_bytes, queue.largest_bytes)

    @property
    def promised(self) -> OpenGroups:
        """What holds room, and what comes before any new prompt."""
        groups = self.open_groups
        if not self.stored:
            return groups
        return groups._replace(num_in_flight=groups.num_in_flight + len(self.stored))

    @property
    def window(self) -> Window:
        """The counters since they were last taken."""
        return self._window

    # --- issue and claim

    def claim(self, worker: tuple[str, str], until: float, base: PolicyVersion = 0) -> Entry:
        """Put the next group, one that waits before a new one, under a lease of (name,
        incarnation), which holds no version older than `base`.
        """
        entry = self.waiting.next()
        if entry is None:
            epoch, prompt = self._source.next()
            group_id = self._ledger.issue(prompt.prompt_id, epoch, self._wall(), to=worker[0])
            entry = Entry(group_id, epoch, prompt)
        else:
            self._ledger.claim(entry.group_id, entry.attempt, worker[0], self._wall())
        entry.base = base
        self.in_flight.begin(entry, worker, self._now(), until)
        return entry

    # --- finish

    def finish(
        self, entry: Entry, group: RolloutGroup, versions: tuple[PolicyVersion, ...]
    ) -> None:
        """Queue a claimed group."""
        self.in_flight.end(entry)
        made = self._queue(entry, group, versions, requeued=False)
        self._window.finished(entry.prompt.prompt_id, made, entry.claimed_at)

    def requeue(
        self, entry: Entry, group: RolloutGroup, versions: tuple[PolicyVersion, ...]
    ) -> None:
        """Queue a group that was stored; its first finish has counted."""
        self._queue(entry, group, versions, requeued=True)
        self._window.num_requeued += 1

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
        reward_mean, reward_std = made.mean_and_deviation
        self._ledger.finish(
            entry.group_id,
            entry.attempt,
            min_version=min(versions, default=None),
            max_version=max(versions, default=None),
            reward_mean=reward_mean,
            reward_std=reward_std,
            num_tokens=sum(made.tokens),
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
        self._ledger.train(group_ids, step, version, self._wall())
        self.stored.trained(group_ids, step)

    def commit(self, step: int) -> None:
        """A checkpoint has all that was trained up to a step: forget the payloads."""
        self.stored.committed(self._ledger.commit(step, self._wall()), step)

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
            self.waiting.add(Entry.of(row, prompts[row.prompt_id]), "step_lost")
        self._window.reissued["step_lost"] += len(rows)
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
        self._ledger.drop(entry.group_id, reason, self._wall())

    @property
    def dirty(self) -> bool:
        """There are transitions that a flush would make durable."""
        return self._ledger.is_dirty

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

    def close(self) -> None:
        """Flush, and close the ledger."""
        self.flush()
        self.abandon()

    def abandon(self) -> None:
        """Close the ledger without what is not durable yet."""
        self._ledger.abandon()
        self.stored.close()

    def _again(self, entry: Entry, reason: str, *, counts: bool = False) -> None:
        self._take_out(entry)
        self._give_up(entry, reason, counts=counts)
        entry.group, entry.versions, entry.masked = None, (), ""
        self.waiting.add(entry, reason)

    def _give_up(self, entry: Entry, reason: str, *, counts: bool) -> None:
        self._ledger.retry(entry.group_id, entry.attempt, reason, self._wall(), counts=counts)
        entry.attempt += 1

    def _take_out(self, entry: Entry) -> None:
        if entry in self.in_flight:
            self.in_flight.end(entry)
            return
        if entry in self.queue:
            self.queue.take(entry.group_id)
        elif self._batched.pop(entry.group_id, None) is None:
            msg = f"group {entry.group_id} is in no place that it could leave"
            raise RuntimeError(msg)
        self._window.has_lost(entry.prompt.prompt_id, entry.made)
        entry.made = None
